"""How the next token is chosen: parameters of a request, and one function for a mixed batch.

The filters are thresholds on the probabilities. They are found by bisection over the bits of the
logits, which needs 32 sums over the vocabulary and no sort: on XLA:CPU a sort of 49k logits takes
5 to 27 ms, as long as a small model's whole step.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int, UInt

MAX_STOP_IDS = 16  # ids that a request may name
MAX_END_IDS = 64  # ids that end a request, the model's own included, for `min_tokens` to forbid
MAX_LOGPROBS = 20
MAX_BEAMS = 64
MAX_TEMPERATURE = 1_000_000  # every token is as likely as the next long before
MAX_SEED = 2**64 - 1
MAX_INDEX = 2**31 - 1  # counts and token ids are 32-bit on the device

Strategy = Literal["auto", "greedy", "sample", "top_k", "top_p", "min_p", "beam"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a request asks of the choice of tokens.

    Filters apply in this order, each to what the one before left: temperature, top_k, top_p, min_p.

    Attributes:
        strategy: "greedy" takes the likeliest token; "sample" draws, with every filter given;
            "top_k", "top_p", "min_p" draw and insist on that filter; "auto" draws if a
            temperature above 0 or a filter is given, and is greedy otherwise.
        beams, length_penalty: of the strategy "beam", which keeps the `beams` likeliest sequences
            and takes the one with the greatest log-probability / length ** length_penalty.
        temperature: logits are divided by it; 0 is greedy; None: 1 when drawing.
        top_k: only the k likeliest tokens; 0: all.
        top_p: only the likeliest tokens that together have this probability (arXiv 1904.09751).
        min_p: only tokens at least this share of the likeliest's probability (arXiv 2407.01082).
        seed: the same seed, prompt and parameters give the same tokens; None: a new one.
        max_tokens: at most so many new tokens; None: up to the context's end.
        min_tokens: no end of sequence and no stop token before so many.
        stop: texts that end the answer; they are not part of it.
        stop_token_ids: ids that end the answer; they are not part of its text.
        ignore_eos: go on after the model's own end of sequence.
        logprobs: also give the log-probability of each token, and of so many likeliest ones.

    Raises:
        ValueError: for a value outside its range.
    """

    strategy: Strategy = "auto"
    beams: int = 4
    length_penalty: float = 1.0
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, right, expected in self._rules():
            if not right:
                raise ValueError(f"{name} must be {expected}, not {getattr(self, name)!r}")

    def _rules(self) -> Iterable[tuple[str, bool, str]]:
        yield "strategy", self.strategy in get_args(Strategy), f"one of {get_args(Strategy)}"
        temperature = 0.0 if self.temperature is None else self.temperature
        cool = _number(temperature, 0, MAX_TEMPERATURE)
        yield "temperature", cool, f"from 0 to {MAX_TEMPERATURE}"
        yield "beams", _whole(self.beams, 1, MAX_BEAMS), f"a whole number from 1 to {MAX_BEAMS}"
        yield "length_penalty", _number(self.length_penalty, -100, 100), "from -100 to 100"
        yield "top_k", _whole(self.top_k, 0), f"a whole number from 0 (all) to {MAX_INDEX}"
        yield "top_p", _number(self.top_p, 0, 1) and self.top_p > 0, "above 0, and at most 1"
        yield "min_p", _number(self.min_p, 0, 1), "from 0 to 1"
        seed = 0 if self.seed is None else self.seed
        most = 1 if self.max_tokens is None else self.max_tokens
        yield "seed", _whole(seed, 0, MAX_SEED), f"a whole number from 0 to {MAX_SEED}"
        yield "max_tokens", _whole(most, 1), f"a whole number from 1 to {MAX_INDEX}"
        yield "min_tokens", _whole(self.min_tokens, 0), f"a whole number from 0 to {MAX_INDEX}"
        yield "stop", all(isinstance(s, str) and s for s in self.stop), "texts, none empty"
        yield (
            "stop_token_ids",
            len(self.stop_token_ids) <= MAX_STOP_IDS
            and all(_whole(i, 0) for i in self.stop_token_ids),
            f"at most {MAX_STOP_IDS} token ids",
        )
        wanted = self.logprobs
        yield (
            "logprobs",
            wanted is None or _whole(wanted, 0, MAX_LOGPROBS),
            f"from 0 to {MAX_LOGPROBS}",
        )
        missing = {"top_k": not self.top_k, "top_p": self.top_p == 1.0, "min_p": not self.min_p}
        yield self.strategy, not missing.get(self.strategy, False), "set for that strategy"

    @property
    def drawing_temperature(self) -> float:
        """The temperature to draw with; 0 for greedy."""
        filtered = bool(self.top_k) or self.top_p < 1.0 or self.min_p > 0.0
        if self.strategy == "greedy" or self.temperature == 0:
            return 0.0
        if self.strategy == "auto" and self.temperature is None and not filtered:
            return 0.0
        return 1.0 if self.temperature is None else self.temperature


def _whole(value: Any, least: int, most: int = MAX_INDEX) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _number(value: Any, least: float, most: float) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
    )


class Sampler(NamedTuple):
    """Parameters and progress of a batch, an array entry per row."""

    temperature: Float[Array, " batch"]
    top_k: Int[Array, " batch"]
    top_p: Float[Array, " batch"]
    min_p: Float[Array, " batch"]
    key: UInt[Array, "batch 2"]
    drawn: Int[Array, " batch"]
    min_tokens: Int[Array, " batch"]
    end_ids: Int[Array, "batch ids"]
    endless: Bool[Array, " batch"]


class Sampled(NamedTuple):
    """Chosen tokens, with log-probabilities where they were asked for.

    Attributes:
        tokens: one per row.
        logprob: of each token, under the model's own distribution (temperature 1, no filter).
        top_ids, top_logprobs: the likeliest tokens.
    """

    tokens: Int[Array, " batch"]
    logprob: Float[Array, " batch"] | None = None
    top_ids: Int[Array, "batch top"] | None = None
    top_logprobs: Float[Array, "batch top"] | None = None


_LANES = 64  # numbers reduced side by side


def sampler_row(params: SamplingParams, end_ids: Iterable[int]) -> Sampler:
    """A batch of one.

    Args:
        end_ids: ids that end the sequence; forbidden until `min_tokens`.

    Raises:
        ValueError: more than `MAX_END_IDS` ids end the sequence.
    """
    seed = secrets.randbits(63) if params.seed is None else params.seed
    ids = np.full((1, MAX_END_IDS), -1, np.int32)
    chosen = sorted({*end_ids, *params.stop_token_ids})
    if len(chosen) > MAX_END_IDS:
        raise ValueError(f"{len(chosen)} ids end a sequence; at most {MAX_END_IDS} can")
    ids[0, : len(chosen)] = chosen
    return _on_device(
        np.array([params.drawing_temperature], np.float32),
        np.array([params.top_k], np.int32),
        np.array([params.top_p], np.float32),
        np.array([params.min_p], np.float32),
        np.array([[seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF]], np.uint32),
        np.zeros(1, np.int32),
        np.array([params.min_tokens], np.int32),
        ids,
        np.array([params.ignore_eos]),
    )


def empty_sampler(batch: int) -> Sampler:
    """Rows that nobody uses: greedy."""
    row = sampler_row(SamplingParams(seed=0), ())
    return _on_device(*(np.repeat(part, batch, axis=0) for part in row))


def _on_device(*parts: np.ndarray) -> Sampler:
    return Sampler(*(jnp.asarray(part) for part in parts))


def sample(
    logits: Float[Array, "batch vocab"], sampler: Sampler, *, logprobs: bool = False
) -> tuple[Sampled, Sampler]:
    """Chooses the next token of each row, and counts it.

    Args:
        logprobs: also compute log-probabilities.
    """
    allowed = _forbid_early_end(logits, sampler)
    drawing = sampler.temperature > 0
    tokens = lax.cond(
        jnp.any(drawing),
        lambda: jnp.where(drawing, _draw(allowed, sampler), argmax(allowed)),
        lambda: argmax(allowed),
    )
    sampled = _with_logprobs(logits, tokens) if logprobs else Sampled(tokens)
    return sampled, sampler._replace(drawn=sampler.drawn + 1)


def ends(tokens: Int[Array, " batch"], sampler: Sampler) -> Bool[Array, " batch"]:
    """Whether a row's token ends its sequence, as far as the device can know.

    A request that goes on after the model's ends may still have its own (`stop_token_ids`), and
    stop texts; the host finds these.
    """
    return jnp.any(tokens[:, None] == sampler.end_ids, axis=-1) & ~sampler.endless


def argmax(logits: Float[Array, "batch vocab"]) -> Int[Array, " batch"]:
    """The first index of each row's greatest number; the last index where one is not a number.

    XLA:CPU computes jnp.argmax number by number: 0.2 ms for 49,000 of them, as long as a layer of a
    small model takes. Two reductions over rows of lanes are vectorized and take a tenth of that.
    """
    vocab = logits.shape[-1]
    missing = -vocab % _LANES
    filled = jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    lanes = filled.reshape(logits.shape[0], -1, _LANES)
    greatest = jnp.max(jnp.max(lanes, axis=1), axis=-1)
    index = jnp.arange(vocab + missing, dtype=jnp.int32).reshape(1, -1, _LANES)
    found = jnp.where(lanes == greatest[:, None, None], index, jnp.int32(vocab - 1))
    return jnp.min(jnp.min(found, axis=1), axis=-1)


def _forbid_early_end(logits: Array, sampler: Sampler) -> Array:
    early = (sampler.drawn < sampler.min_tokens)[:, None] & (sampler.end_ids >= 0)
    columns = jnp.where(early, sampler.end_ids, logits.shape[-1])
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[rows, columns].set(-jnp.inf, mode="drop")


def _draw(logits: Array, sampler: Sampler) -> Array:
    """Draws with the Gumbel-max trick from what the filters leave."""
    temperature = jnp.where(sampler.temperature > 0, sampler.temperature, 1.0)
    logits = logits.astype(jnp.float32)
    # Below the likeliest, so that a tiny temperature leads to -inf and never to inf.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None]
    kept = filter_logits(scaled, sampler)

    def noise(key: Array, count: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), count)
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

    return argmax(kept + jax.vmap(noise)(sampler.key, sampler.drawn))


def filter_logits(
    scaled: Float[Array, "batch vocab"], sampler: Sampler
) -> Float[Array, "batch vocab"]:
    """-inf for every token that top_k, top_p or min_p drops; ties at a threshold all stay."""
    vocab = scaled.shape[-1]
    order = _ordered_bits(scaled)
    k = jnp.where(sampler.top_k > 0, jnp.minimum(sampler.top_k, vocab), vocab)
    least = _largest(lambda bits: jnp.sum(order >= bits, axis=-1, dtype=jnp.int32) >= k, k.shape)
    highest = jnp.max(scaled, axis=-1, keepdims=True)
    weights = jnp.where(order >= least[:, None], jnp.exp(scaled - highest), 0.0)
    # The likeliest token alone weighs 1; without a bound a tiny top_p would keep not even that.
    mass = jnp.maximum(sampler.top_p * jnp.sum(weights, axis=-1), 0.5)

    def enough(bits: Array) -> Bool[Array, " batch"]:
        return jnp.sum(jnp.where(order >= bits, weights, 0.0), axis=-1) >= mass

    # Rounding could leave the sum of all just below its own multiple by 1.
    nucleus = jnp.where(sampler.top_p < 1.0, _largest(enough, k.shape), jnp.uint32(0))
    kept = order >= jnp.maximum(least, nucleus)[:, None]
    kept = kept & (weights >= sampler.min_p[:, None])
    return jnp.where(kept, scaled, -jnp.inf)


def _ordered_bits(x: Float[Array, "batch vocab"]) -> UInt[Array, "batch vocab"]:
    """Integers in the same order as the floats; 0 and -0 are the same."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits & sign != 0, jnp.uint32(0) - bits, bits | sign)


def _largest(holds: Any, shape: tuple[int, ...]) -> UInt[Array, " batch"]:
    """The largest integer for which `holds`, which holds for 0 and never again once it fails."""

    def try_bit(i: Array, so_far: Array) -> Array:
        higher = so_far | (jnp.uint32(1) << (jnp.uint32(31) - i.astype(jnp.uint32)))
        return jnp.where(holds(higher[:, None]), higher, so_far)

    return lax.fori_loop(0, 32, try_bit, jnp.zeros(shape, jnp.uint32))


def _with_logprobs(logits: Array, tokens: Array) -> Sampled:
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    # Without the barrier XLA:CPU turns a top_k that is used in part into a sort.
    count = min(MAX_LOGPROBS, logits.shape[-1])
    top, ids = lax.optimization_barrier(lax.top_k(logprobs, count))
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return Sampled(tokens, chosen, ids, top)

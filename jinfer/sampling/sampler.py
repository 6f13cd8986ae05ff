"""How the next token is chosen: one function for a mixed batch.

The filters are thresholds on the probabilities. They are found by bisection over the bits of the
logits, which needs 32 sums over the vocabulary and no sort: on XLA:CPU a sort of 49k logits takes
5 to 27 ms, as long as a small model's whole step.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int, UInt

from jinfer.sampling.params import MAX_END_IDS, MAX_LOGPROBS, SamplingParams


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

"""Penalties, DRY, and rules: changes of logits by the request or by the tokens so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jinfer.sampling.param_types import MAX_BAD_LENGTH
from jinfer.sampling.sampling_metadata import SamplerContext
from jinfer.sampling.token_history import History, scatter_ids

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt

type Logits = Float[Array, "rows vocab"]
type _Counts = tuple[Array, Array]  # whether a token occurred, and how often in the answer


def rules(x: Logits, context: SamplerContext) -> Logits:
    """Adds `logit_bias`, and forbids bad words, banned tokens and an end before `min_tokens`.

    A bad word's last token is forbidden if its other tokens end the sequence.
    """
    metadata = context.metadata
    recent = context.history.back(np.arange(MAX_BAD_LENGTH - 1, 0, -1, dtype=np.int32))
    words, last = metadata.bad_words[..., :-1], metadata.bad_words[..., -1]
    begun = jnp.all((words < 0) | (words == recent[:, None]), axis=-1)
    early = context.state.drawn < metadata.column("min_tokens")
    forbidden = jnp.concatenate(
        [jnp.where(begun, last, -1), jnp.where(early[:, None], metadata.end_ids, -1)], axis=-1
    )
    ids = jnp.concatenate([metadata.bias_ids, forbidden], axis=-1)
    never = jnp.full(forbidden.shape, -jnp.inf)
    added = jnp.concatenate([metadata.biases, never], axis=-1)
    return x.at[scatter_ids(ids, x.shape[-1])].add(added, mode="drop")


def penalties(x: Logits, context: SamplerContext) -> Logits:
    """Lowers the logits of tokens that occur in the sequence.

    The repetition penalty (arXiv 1909.05858) counts prompt and answer, the presence and frequency
    penalties the answer alone, as in vLLM; all within the last `penalty_last_n` tokens.
    """
    metadata, history = context.metadata, context.history
    window = metadata.column("penalty_last_n")
    start = jnp.where(window < 0, 0, history.lengths - window)
    answer = jnp.maximum(start, history.prompts)

    def count(counts: _Counts, positions: Int[Array, "rows block"]) -> _Counts:
        seen, written = counts
        tokens = history.at(positions)
        where = scatter_ids(jnp.where(positions >= start[:, None], tokens, -1), x.shape[-1])
        new = (positions >= answer[:, None]).astype(jnp.int32)
        return seen.at[where].set(True, mode="drop"), written.at[where].add(new, mode="drop")

    none = jnp.zeros(x.shape, jnp.bool_), jnp.zeros(x.shape, jnp.int32)
    seen, written = history.fold(count, none)
    factor = metadata.column("repetition_penalty")[:, None]
    x = jnp.where(seen, jnp.where(x > 0, x / factor, x * factor), x)
    x = x - metadata.column("frequency_penalty")[:, None] * written.astype(jnp.float32)
    x = x - jnp.where(written > 0, metadata.column("presence_penalty")[:, None], 0.0)
    # A tiny repetition penalty overflows a logit; it stays the greatest.
    return jnp.minimum(x, jnp.finfo(jnp.float32).max)


def masked(
    x: Logits,
    mask: UInt[Array, "slots words"],
    slots: Int[Array, " rows"],
    rows: Bool[Array, " rows"],
) -> Logits:
    """Forbids tokens whose bit in a slot's mask is 0, in some rows; bit 0 is the first token."""
    bits = mask[slots][:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None] & 1
    allowed = bits.reshape(x.shape[0], -1)[:, : x.shape[-1]] != 0
    return jnp.where(allowed | ~rows[:, None], x, -jnp.inf)


# Maximum counted length of a repetition: at the usual base 1.75 it gives 1e31 times the multiplier.
# Without it a text of one repeated token would be compared with itself at all lengths.
MAX_MATCH = 128
_MOST = 1e30  # finite, so that a penalized token is still likelier than a forbidden one


def dry(x: Float[Array, "rows vocab"], context: SamplerContext) -> Float[Array, "rows vocab"]:
    """Takes multiplier * base ** (match - allowed length) from the logits.

    A token's match is the length of the longest suffix of the sequence that it followed before. No
    match crosses a breaker.
    """
    metadata, history, vocab = context.metadata, context.history, x.shape[-1]
    window = metadata.column("dry_penalty_last_n")
    start = jnp.where(window < 0, 0, jnp.maximum(history.lengths - window, 0))
    breaks = jnp.zeros(x.shape, jnp.bool_)
    breaks = breaks.at[scatter_ids(metadata.breakers, vocab)].set(True, mode="drop")
    end = _end(history, start, breaks)

    def longest(matches: Array, positions: Int[Array, "rows block"]) -> Array:
        length = _matches(history, positions, start, end)
        return matches.at[scatter_ids(history.at(positions), vocab)].max(length, mode="drop")

    matches = history.fold(longest, jnp.zeros(x.shape, jnp.int32))
    excess = matches - metadata.column("dry_allowed_length")[:, None]
    power = metadata.column("dry_base")[:, None] ** excess.astype(jnp.float32)
    penalty = jnp.minimum(metadata.column("dry_multiplier")[:, None] * power, _MOST)
    # A breaker is never penalized: no match goes on after it.
    return x - jnp.where((excess >= 0) & (matches > 0) & ~breaks, penalty, 0.0)


def _end(history: History, start: Array, breaks: Bool[Array, "rows vocab"]) -> Array:
    """Returns each row's last tokens, latest first; -2 from the first that ends every match."""
    back = np.arange(1, MAX_MATCH + 1, dtype=np.int32)
    tokens = history.back(back)
    places = history.lengths[:, None] - jnp.asarray(back)[None]
    broken = jnp.take_along_axis(breaks, jnp.maximum(tokens, 0), axis=-1)
    stop = broken | (tokens < 0) | (places < start[:, None])
    index = jnp.asarray(back)[None]
    first = jnp.min(jnp.where(stop, index, MAX_MATCH + 1), axis=-1, keepdims=True)
    return jnp.where(index < first, tokens, -2)


def _matches(
    history: History, positions: Int[Array, "rows block"], start: Array, end: Array
) -> Int[Array, "rows block"]:
    """Counts the tokens before each position that equal the last tokens of the sequence."""

    def more(state: tuple[Array, Array, Array]) -> Array:
        length, alive, _ = state
        return (length < MAX_MATCH) & jnp.any(alive)

    def compare(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        length, alive, matched = state
        places = positions - 1 - length
        expected = lax.dynamic_slice_in_dim(end, length, 1, axis=1)
        alive = alive & (history.at(places) == expected) & (places >= start[:, None])
        return length + 1, alive, matched + alive.astype(jnp.int32)

    alive = (positions < history.lengths[:, None]) & (end[:, :1] >= 0)
    none = jnp.zeros_like(positions)
    return lax.while_loop(more, compare, (jnp.int32(0), alive, none))[2]

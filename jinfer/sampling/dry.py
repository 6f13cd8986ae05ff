"""DRY penalty (p-e-w, 2024): tokens that would prolong a repetition become less likely."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jinfer.sampling.sampling_metadata import SamplerContext
from jinfer.sampling.token_history import History, scatter_ids

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

# Longer repetitions count as this long: at the usual base 1.75 that is 1e31 times the multiplier.
# A text of one repeated token would else be compared with itself at all lengths.
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
    """The last tokens of each row, latest first; -2 from the first that ends every match."""
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
    """How many tokens before each position equal the last ones of the sequence."""

    def more(state: tuple[Array, Array, Array]) -> Array:
        length, alive, _ = state
        return (length < MAX_MATCH) & jnp.any(alive)

    def compare(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        length, alive, matched = state
        places = positions - 1 - length
        wanted = lax.dynamic_slice_in_dim(end, length, 1, axis=1)
        alive = alive & (history.at(places) == wanted) & (places >= start[:, None])
        return length + 1, alive, matched + alive.astype(jnp.int32)

    alive = (positions < history.lengths[:, None]) & (end[:, :1] >= 0)
    none = jnp.zeros_like(positions)
    return lax.while_loop(more, compare, (jnp.int32(0), alive, none))[2]

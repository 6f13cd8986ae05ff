"""DRY (p-e-w, 2024): a token that would go on repeating what was said is made less likely."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jinfer.sampling.sampling_metadata import Turn
from jinfer.sampling.token_history import History, scatter_ids

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

# Longer repetitions count as this long: at the usual base 1.75 that is 1e31 times the multiplier,
# and a text of one token over and over would be compared with itself at all lengths.
MAX_MATCH = 128
_MOST = 1e30  # finite, so that a punished token is still likelier than a forbidden one


def dry(x: Float[Array, "rows vocab"], turn: Turn) -> Float[Array, "rows vocab"]:
    """Takes multiplier * base ** (match - allowed length) from the logits.

    A token's match is the length of the longest end of the sequence that is followed by it
    somewhere in the sequence. No match crosses a breaker.
    """
    sampler, history, vocab = turn.sampler, turn.history, x.shape[-1]
    window = sampler.whole("dry_penalty_last_n")
    start = jnp.where(window < 0, 0, jnp.maximum(history.lengths - window, 0))
    breaks = jnp.zeros(x.shape, jnp.bool_)
    breaks = breaks.at[scatter_ids(sampler.breakers, vocab)].set(True, mode="drop")
    end = _end(history, start, breaks)

    def longest(matches: Array, positions: Int[Array, "rows block"]) -> Array:
        length = _matches(history, positions, start, end)
        return matches.at[scatter_ids(history.at(positions), vocab)].max(length, mode="drop")

    matches = history.fold(longest, jnp.zeros(x.shape, jnp.int32))
    excess = matches - sampler.whole("dry_allowed_length")[:, None]
    power = sampler.number("dry_base")[:, None] ** excess.astype(jnp.float32)
    penalty = jnp.minimum(sampler.number("dry_multiplier")[:, None] * power, _MOST)
    # A breaker is never punished: what follows it begins anew.
    return x - jnp.where((excess >= 0) & (matches > 0) & ~breaks, penalty, 0.0)


def _end(history: History, start: Array, breaks: Bool[Array, "rows vocab"]) -> Array:
    """The last tokens of each row, the very last first; -2 from the first that cannot match on."""
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
    """How many tokens before each position are the last ones of the sequence, in order."""

    def more(state: tuple[Array, Array, Array]) -> Array:
        length, alive, _ = state
        return (length < MAX_MATCH) & jnp.any(alive)

    def one(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        length, alive, found = state
        places = positions - 1 - length
        wanted = lax.dynamic_slice_in_dim(end, length, 1, axis=1)
        alive = alive & (history.at(places) == wanted) & (places >= start[:, None])
        return length + 1, alive, found + alive.astype(jnp.int32)

    alive = (positions < history.lengths[:, None]) & (end[:, :1] >= 0)
    none = jnp.zeros_like(positions)
    return lax.while_loop(more, one, (jnp.int32(0), alive, none))[2]

"""Attention batch: positions and block tables of tokens, and score modifiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int


class QueryBatch(NamedTuple):
    """Positions of the tokens of a flat batch, and the keys they see.

    Tokens of one sequence are adjacent: a run. Along a run the number of keys between low and last
    only rises or only falls.

    Attributes:
        rows: each token's row of `tables`; -1: padding.
        positions: of each token in its sequence.
        low, last: the first and last key a token may see: the begin of a sliding window (it may be
            negative), and the own position if attention is causal.
        tables: block tables: entry j is the block of keys from TOKENS * j. Unused entries may be
            anything.
    """

    rows: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    low: Int[Array, " tokens"]
    last: Int[Array, " tokens"]
    tables: Int[Array, "rows blocks"]


class ScoreModifiers(NamedTuple):
    """Score modifiers; a distance is the query's minus the key's position.

    Attributes:
        scale: multiplies q @ k.
        softcap: scores then become softcap * tanh(score / softcap).
        by_distance: column distance - lowest of this is then added; distances beyond its ends use
            the nearest column.
        slopes: slope * distance is then subtracted (ALiBi).
        sinks: scores that take part in the softmax and have no value.
    """

    scale: float
    softcap: float | None = None
    by_distance: Float[Array, "heads distances"] | None = None
    lowest: int = 0
    slopes: Float[Array, " heads"] | None = None
    sinks: Float[Array, " heads"] | None = None

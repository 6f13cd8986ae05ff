"""The batch that attention serves: where tokens stand, and what is done to their scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int


class Queries(NamedTuple):
    """Where the tokens of a flat batch stand, and what they see.

    Tokens of one sequence stand next to each other: a run. Along a run the number of keys between
    low and last only rises or only falls.

    Attributes:
        rows: which row of `tables` is each token's sequence's; -1: padding.
        positions: of each token in its sequence.
        low, last: the first and the last key that it may see: a window's, and its own position
            where attention is causal; low may be negative.
        tables: entry j is the block of keys TOKENS * j and so on. What nobody sees may be anything.
    """

    rows: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    low: Int[Array, " tokens"]
    last: Int[Array, " tokens"]
    tables: Int[Array, "rows blocks"]


class Scores(NamedTuple):
    """What is done to products of queries and keys; a distance is query's minus key's position.

    Attributes:
        scale: multiplies them.
        softcap: then they become softcap * tanh(score / softcap).
        by_distance: then column distance - lowest of this is added; distances beyond its ends
            count as the nearest that it has.
        slopes: then slope * distance is subtracted.
        sinks: scores that take part in the softmax and have no value.
    """

    scale: float
    softcap: float | None = None
    by_distance: Float[Array, "heads distances"] | None = None
    lowest: int = 0
    slopes: Float[Array, " heads"] | None = None
    sinks: Float[Array, " heads"] | None = None

"""Token history: the tokens of each row's sequence, as samplers read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


BLOCK = 1024  # positions per block
NOTHING = -1  # the token at positions outside a sequence


class History(NamedTuple):
    """The sequences of rows.

    Attributes:
        tokens: tokens of every slot, the prompt first.
        slots: the slot of each row's sequence.
        lengths, prompts: tokens of each row's sequence, and of its prompt.
    """

    tokens: Int[Array, "slots length"]
    slots: Int[Array, " rows"]
    lengths: Int[Array, " rows"]
    prompts: Int[Array, " rows"]

    def back(self, counts: Int[np.ndarray, " n"]) -> Int[Array, "rows n"]:
        """Returns tokens by distance from the end: 1 is the last token."""
        return self.at(self.lengths[:, None] - jnp.asarray(counts, jnp.int32)[None])

    def only(self, rows: Bool[Array, " rows"]) -> History:
        """Returns a history with empty sequences in the other rows."""
        return self._replace(lengths=jnp.where(rows, self.lengths, 0))

    def at(self, positions: Int[Array, "rows ..."]) -> Int[Array, "rows ..."]:
        """Returns the tokens at some positions of each row; `NOTHING` outside the sequence."""
        ones = (1,) * (positions.ndim - 1)
        lengths, slots = self.lengths.reshape(-1, *ones), self.slots.reshape(-1, *ones)
        found = self.tokens[slots, jnp.clip(positions, 0, self.tokens.shape[1] - 1)]
        return jnp.where((positions >= 0) & (positions < lengths), found, NOTHING)

    def fold[State](
        self, body: Callable[[State, Int[Array, "rows block"]], State], state: State
    ) -> State:
        """Folds over all positions of the longest sequence, a block at a time.

        So the time depends on the tokens, not on the capacity.
        """
        block = min(BLOCK, self.tokens.shape[1])
        first = jnp.broadcast_to(jnp.arange(block, dtype=jnp.int32), (self.lengths.shape[0], block))
        blocks = (jnp.max(self.lengths) + block - 1) // block
        return lax.fori_loop(0, blocks, lambda i, state: body(state, first + i * block), state)


def scatter_ids(ids: Int[Array, "rows n"], vocab: int) -> tuple[Array, Array]:
    """Returns indices of ids in an array [rows, vocab] for `.at[...]` with mode="drop".

    `NOTHING` and other invalid ids are dropped; a negative index would count from the end.
    """
    rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    return rows, jnp.where(ids >= 0, ids, vocab)

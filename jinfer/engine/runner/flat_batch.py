"""Flat batch: tokens of several sequences in one row, with their slots and positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.engine.runner.device_state import State

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from jinfer.nn.forward_context import ForwardBatch, TreeCopies

type Tables = Mapping[str, Int[Array, "rows blocks"]]


class FlatBatch(NamedTuple):
    """A flat batch.

    Attributes:
        tokens: token ids.
        rows: row of the block tables for each token; -1: padding.
        positions: position of each token in its sequence.
        prompts: prompt tokens of each row's sequence.
        encoded: tokens of the encoder's output that each row's sequence attends to.
        tables: block tables.
        copies: places of tokens that stand in several rows, as in draft trees.
    """

    tokens: Int[Array, " tokens"]
    rows: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    prompts: Int[Array, " rows"]
    encoded: Int[Array, " rows"]
    tables: Tables
    copies: TreeCopies | None = None

    def step(self) -> ForwardBatch:
        """The forward context of the model's modules."""
        # A start that finds all its programs compiled does not import this.
        from jinfer.nn.forward_context import ForwardBatch

        at = ForwardBatch.flat(self.rows, self.positions, self.prompts, self.tables, self.encoded)
        return at._replace(copies=self.copies)


def make_flat_batch(
    state: State,
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    tables: Tables,
    last: Int[Array, " chosen"],
) -> tuple[FlatBatch, Int[Array, " chosen"]]:
    """The flat batch of `steps.begin_logits`, and the state rows that its results belong to.

    Args:
        rows, positions, tables, last: as of `steps.begin_logits`.
    """
    known = or_padding_row(state, rows)
    newest = positions < 0
    positions = jnp.where(newest, state.lengths[known] - 1, positions)
    used = jnp.where(newest & ~can_continue(state, rows), -1, rows)
    positions = jnp.where(used >= 0, positions, 0)
    tokens = state.history[known, positions]
    batch = FlatBatch(tokens, used, positions, state.prompts, state.encoded, tables)
    return batch, or_padding_row(state, jnp.where(last >= 0, used[jnp.maximum(last, 0)], -1))


def or_padding_row(state: State, rows: Array) -> Array:
    """State rows; the padding row in place of -1."""
    return jnp.where(rows >= 0, rows, state.lengths.shape[0] - 1)


def can_continue(state: State, rows: Array) -> Bool[Array, " rows"]:
    """Whether sequences may have one more token: neither ended nor at their limit."""
    some = or_padding_row(state, rows)
    return (rows >= 0) & ~state.ended[some] & (state.lengths[some] < state.limits[some])


def padded(ids: Sequence[int] | np.ndarray, size: int, filling: int = 0) -> Any:
    """Numbers as an int32 array that is padded at its end."""
    out = np.full(size, filling, np.int32)
    out[: len(ids)] = ids
    return out

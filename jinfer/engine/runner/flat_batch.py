"""Where the tokens of a flat batch stand, as far as the device alone may know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array

from jinfer.engine.runner.device_state import State
from jinfer.nn.forward_context import Copies, Step

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

type Tables = Mapping[str, Int[Array, "rows blocks"]]


class Places(NamedTuple):
    """A flat batch: its tokens, and where they stand.

    Attributes:
        tokens: their ids.
        rows: of the tables, for each token; -1: padding.
        positions: in its sequence.
        prompts: tokens of each row's sequence as far as they are known.
        encoded: tokens of the encoder's output that each row's sequence sees.
        copies: where tokens are that stand in several rows.
    """

    tokens: Int[Array, " tokens"]
    rows: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    prompts: Int[Array, " rows"]
    encoded: Int[Array, " rows"]
    copies: Copies | None = None

    def step(self, tables: Tables) -> Step:
        """What the model's modules are told of it."""
        at = Step.flat(self.rows, self.positions, self.prompts, tables, self.encoded)
        return at._replace(copies=self.copies)


def placed(
    state: State,
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    last: Int[Array, " chosen"],
) -> tuple[Places, Int[Array, " chosen"]]:
    """The flat batch that `logits` computes, and the rows of the state that its results are of."""
    some = or_spare(state, rows)
    newest = positions < 0
    positions = jnp.where(newest, state.lengths[some] - 1, positions)
    here = jnp.where(newest & ~going(state, rows), -1, rows)
    positions = jnp.where(here >= 0, positions, 0)
    places = Places(state.history[some, positions], here, positions, state.prompts, state.encoded)
    return places, or_spare(state, jnp.where(last >= 0, here[jnp.maximum(last, 0)], -1))


def or_spare(state: State, rows: Array) -> Array:
    """Rows of the state; the one that nobody has where there is none."""
    return jnp.where(rows >= 0, rows, state.lengths.shape[0] - 1)


def going(state: State, rows: Array) -> Bool[Array, " rows"]:
    """Whether sequences may have one more token."""
    some = or_spare(state, rows)
    return (rows >= 0) & ~state.ended[some] & (state.lengths[some] < state.limits[some])

"""State metadata: the sequences of a flat batch, and the state slot of each.

A recurrence keeps one state of fixed size for each sequence in a *state table*, [slots, ...] in
float32. Each sequence with tokens in the batch reads its slot, or starts at zero if its first token
is here, and writes the state after its last token back. It also copies its state to other slots
(snapshots) after the tokens that end a block. Drafted tokens only read the table until they are
accepted: see `drafted_scan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array

from jinfer.cpu import recurrence_call as custom
from jinfer.ops.attention.kv_cache import BLOCK, AttentionMetadata
from jinfer.ops.backend import backend

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


class SequenceRuns(NamedTuple):
    """The runs of a flat batch: the adjacent tokens of each sequence.

    Attributes:
        rows: each token's run; -1: padding, whose output is zero.
        starts, lengths: first token and number of tokens of each run; length 0: none.
        slots: row of the state table of each run; no two runs with tokens share one.
        fresh: whether a run begins at position 0, so that its state is zero and its slot is
            ignored.
        copies: row of the state table that the state after each token is copied to; -1: none. At
            most one token in `BLOCK` of a run has one.
    """

    rows: Int[Array, " tokens"]
    starts: Int[Array, " runs"]
    lengths: Int[Array, " runs"]
    slots: Int[Array, " runs"]
    fresh: Bool[Array, " runs"]
    copies: Int[Array, " tokens"]


class DraftRuns(SequenceRuns):
    """Runs of drafted tokens, which may be rejected: the states before them are kept."""


def sequence_runs(at: AttentionMetadata, tables: Int[Array, "rows blocks"]) -> SequenceRuns:
    """Returns the runs of a flat batch.

    Args:
        at: its rows and positions; tokens of one sequence are adjacent, in rising positions.
        tables: for each row of the block tables its state slot, then at j > 0 a number that is 1
            above the slot for a copy of the state after `BLOCK` j tokens; 0: no copy.
    """
    runs, tokens = tables.shape[0], at.rows.shape[0]
    rows = jnp.where(at.rows < 0, runs, at.rows)
    lengths = jnp.zeros(runs, jnp.int32).at[rows].add(1, mode="drop")
    here = jnp.arange(tokens, dtype=jnp.int32)
    starts = jnp.full(runs, tokens, jnp.int32).at[rows].min(here, mode="drop")
    starts = jnp.where(lengths > 0, starts, 0)
    after = at.positions + 1
    ends = (at.rows >= 0) & (after % BLOCK == 0)
    copies = tables.at[jnp.maximum(at.rows, 0), after // BLOCK].get(mode="fill", fill_value=0)
    fresh = at.positions[starts] == 0
    return SequenceRuns(
        at.rows, starts, lengths, tables[:, 0], fresh, jnp.where(ends, copies, 0) - 1
    )


def is_first(runs: SequenceRuns) -> Bool[Array, " tokens"]:
    """Whether each token is its sequence's first, at position 0."""
    tokens = runs.rows.shape[0]
    starts = jnp.where(runs.fresh & (runs.lengths > 0), runs.starts, tokens)
    return jnp.zeros(tokens, bool).at[starts].set(True, mode="drop")


def custom_runs(runs: SequenceRuns) -> custom.Runs | None:
    """Converts runs to operands of custom calls; None where XLA computes recurrences."""
    if backend() != "cpu" or not custom.available():
        return None
    fresh, kept = runs.fresh.astype(jnp.int32), not isinstance(runs, DraftRuns)
    return custom.Runs(runs.starts, runs.lengths, runs.slots, fresh, runs.copies, kept)

"""Short convolution: causal and depthwise, with the last inputs of a sequence as its state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jinfer.cpu import recurrence_call as custom
from jinfer.ops.attention.kv_cache import BLOCK
from jinfer.ops.recurrence.drafted_scan import keeps_drafted_states
from jinfer.ops.recurrence.sequence_runs import DraftRuns, SequenceRuns, custom_runs

if TYPE_CHECKING:
    from jaxtyping import Float


@keeps_drafted_states
def short_conv(
    x: Float[Array, "tokens channels"],
    weight: Float[Array, "taps channels"],
    bias: Float[Array, " channels"] | None,
    table: Float[Array, "slots taps_1 channels"],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens channels"], Float[Array, "slots taps_1 channels"]]:
    """Sums weight[j] times the input taps - 1 - j tokens before over j, plus bias.

    All float32. There are zeros before a sequence; the state is its last taps - 1 inputs, oldest
    first.

    Args:
        table: may be donated.
    """
    if (at := custom_runs(runs)) is not None:
        return custom.short_conv(x, weight, bias, table, at)
    taps = weight.shape[0]
    tokens = jnp.arange(x.shape[0], dtype=jnp.int32)
    run = jnp.maximum(runs.rows, 0)
    before = _before(table, runs)
    y = jnp.zeros_like(x) if bias is None else jnp.broadcast_to(bias[None], x.shape)
    for j in range(taps):
        y = y + weight[j][None] * _inputs(x, before, runs, run, tokens - (taps - 1 - j))
    y = jnp.where(runs.rows[:, None] < 0, 0.0, y)
    if taps == 1 or isinstance(runs, DraftRuns):
        return y, table
    # The ends of runs, and the tokens whose states are copied.
    rows, none = jnp.arange(runs.starts.shape[0], dtype=jnp.int32), table.shape[0]
    max_copies = min(x.shape[0], x.shape[0] // BLOCK + rows.shape[0])
    (copied,) = jnp.nonzero(runs.copies >= 0, size=max_copies, fill_value=x.shape[0])
    run = jnp.concatenate([rows, run.at[copied].get(mode="clip")])
    ends = jnp.concatenate([runs.starts + runs.lengths, copied.astype(jnp.int32) + 1])
    last = [_inputs(x, before, runs, run, ends - taps + 1 + m) for m in range(taps - 1)]
    slots = [
        jnp.where(runs.lengths > 0, runs.slots, none),
        runs.copies.at[copied].get(mode="fill", fill_value=none),
    ]
    return y, table.at[jnp.concatenate(slots)].set(jnp.stack(last, axis=1), mode="drop")


def _before(table: Array, runs: SequenceRuns) -> Array:
    """Returns the inputs before each run, [runs, taps - 1, channels]."""
    slots = jnp.where(runs.lengths > 0, runs.slots, 0)
    return jnp.where(runs.fresh[:, None, None], 0.0, table[slots])


def _inputs(x: Array, before: Array, runs: SequenceRuns, run: Array, at: Array) -> Array:
    """Returns the inputs at indices `at` of the batch, which may precede those of their runs."""
    if not before.shape[1]:
        return x.at[at].get(mode="clip")
    ahead = at - runs.starts[run]
    old = before[run, jnp.maximum(before.shape[1] + ahead, 0)]
    return jnp.where(ahead[:, None] < 0, old, x.at[jnp.maximum(at, 0)].get(mode="clip"))

"""Ragged scan: a recurrence over a flat batch in XLA operations, token by token or in chunks.

`scan_tokens` is the definition, and faster on CPUs. `scan_chunks` takes one step for every sequence
with a single token, all at once (decoding), and passes through the others in chunks of parallel
work (prompts); the loop runs over the chunks that there are. `scan_text`, for derivatives, has a
fixed number of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.ops.backend import backend, needs_derivatives
from jinfer.ops.recurrence.sequence_runs import DraftRuns, SequenceRuns

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

# (state, a token's inputs) -> (state, output).
type Step = Callable[[Array, Any], tuple[Array, Array]]
# (state, inputs [size, ...], which tokens are real) -> (state, outputs [size, ...]). Inputs of
# tokens that are not real are zero.
type ChunkStep = Callable[[Array, Any, Array], tuple[Array, Array]]


def ragged_scan(
    step: Step,
    chunk: ChunkStep,
    size: int,
    inputs: Any,
    table: Float[Array, "slots ..."],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens ..."], Float[Array, "slots ..."]]:
    """A recurrence over a flat batch.

    Args:
        step: one token of one sequence.
        chunk: `size` tokens of one sequence.
        inputs: arrays [tokens, ...] in any structure.
        table: state table; may be donated.

    Returns:
        The outputs, zero for padding, and the table.
    """
    if not runs.rows.shape[0]:
        return _empty(step, inputs, table), table
    if isinstance(runs, DraftRuns):
        own = jnp.arange(runs.slots.shape[0], dtype=jnp.int32)
        on_copies = SequenceRuns(*runs)._replace(slots=own)
        return ragged_scan(step, chunk, size, inputs, table[runs.slots], on_copies)[0], table
    if needs_derivatives():
        return scan_text(chunk, size, inputs, table, runs)
    if backend() == "cpu":
        return scan_tokens(step, inputs, table, runs)
    return scan_chunks(step, chunk, size, inputs, table, runs)


def scan_tokens(
    step: Step, inputs: Any, table: Float[Array, "slots ..."], runs: SequenceRuns
) -> tuple[Float[Array, "tokens ..."], Float[Array, "slots ..."]]:
    """`ragged_scan`, one token after the other."""
    tokens = jnp.arange(runs.rows.shape[0], dtype=jnp.int32)

    def one(table: Array, token: tuple[Array, Array, Any]) -> tuple[Array, Array]:
        at, row, values = token
        run = jnp.maximum(row, 0)
        slot = runs.slots[run]
        begins = runs.fresh[run] & (runs.starts[run] == at)
        before = jnp.where(begins, 0.0, table[slot])
        after, out = step(before, values)
        # Padding writes nothing.
        table = table.at[jnp.where(row < 0, table.shape[0], slot)].set(after, mode="drop")
        return table, jnp.where(row < 0, 0.0, out)

    table, out = lax.scan(one, table, (tokens, runs.rows, inputs))
    return out, table


def scan_chunks(
    step: Step,
    chunk: ChunkStep,
    size: int,
    inputs: Any,
    table: Float[Array, "slots ..."],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens ..."], Float[Array, "slots ..."]]:
    """`ragged_scan`, single tokens by one vectorized step and longer runs in chunks."""
    out, table = _single_tokens(step, inputs, table, runs)
    chunks = jnp.where(runs.lengths > 1, -(-runs.lengths // size), 0)
    ends = jnp.cumsum(chunks)
    here = jnp.arange(size, dtype=jnp.int32)
    tokens = out.shape[0]

    def one(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, table = carry
        run = jnp.searchsorted(ends, i, side="right").astype(jnp.int32)
        done = (i - (ends[run] - chunks[run])) * size
        real = here < runs.lengths[run] - done
        places = jnp.where(real, runs.starts[run] + done + here, tokens)
        taken = jax.tree.map(lambda x: x.at[places].get(mode="fill", fill_value=0), inputs)
        slot = runs.slots[run]
        before = jnp.where(runs.fresh[run] & (done == 0), 0.0, table[slot])
        after, values = chunk(before, taken, real)
        return out.at[places].set(values, mode="drop"), table.at[slot].set(after)

    return lax.fori_loop(0, ends[-1], one, (out, table))


def scan_text(
    chunk: ChunkStep,
    size: int,
    inputs: Any,
    table: Float[Array, "slots ..."],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens ..."], Float[Array, "slots ..."]]:
    """`ragged_scan` of a single sequence, in as many chunks as the batch has: differentiable."""
    assert runs.slots.shape == (1,), "a whole text"
    tokens = runs.rows.shape[0]
    count = -(-tokens // size)
    real = runs.rows >= 0

    def cut(x: Array) -> Array:
        more = [(0, count * size - tokens)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, more).reshape(count, size, *x.shape[1:])

    def one(state: Array, part: tuple[Array, Any]) -> tuple[Array, Array]:
        return chunk(state, part[1], part[0])

    taken = jax.tree.map(lambda x: jnp.where(_as_rows(real, x), x, jnp.zeros_like(x)), inputs)
    before = jnp.where(runs.fresh[0], 0.0, table[runs.slots[0]])
    after, out = lax.scan(one, before, (cut(real), jax.tree.map(cut, taken)))
    out = out.reshape(count * size, *out.shape[2:])[:tokens]
    return jnp.where(_as_rows(real, out), out, 0.0), table.at[runs.slots].set(after[None])


def _single_tokens(
    step: Step, inputs: Any, table: Array, runs: SequenceRuns
) -> tuple[Array, Array]:
    """The runs of one token each; all other outputs are zero."""
    single = runs.lengths == 1
    before = table[jnp.where(single, runs.slots, 0)]
    before = jnp.where(_as_rows(runs.fresh, before), 0.0, before)
    after, values = jax.vmap(step)(before, jax.tree.map(lambda x: x[runs.starts], inputs))
    tokens = runs.rows.shape[0]
    out = jnp.zeros((tokens, *values.shape[1:]), values.dtype)
    out = out.at[jnp.where(single, runs.starts, tokens)].set(values, mode="drop")
    slots = jnp.where(single, runs.slots, table.shape[0])
    return out, table.at[slots].set(after, mode="drop")


def _as_rows(flags: Bool[Array, " rows"], like: Array) -> Array:
    return flags.reshape(flags.shape + (1,) * (like.ndim - 1))


def _empty(step: Step, inputs: Any, table: Array) -> Array:
    token = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), inputs)
    state = jax.ShapeDtypeStruct(table.shape[1:], table.dtype)
    out = jax.eval_shape(step, state, token)[1]
    return jnp.zeros((0, *out.shape), out.dtype)

"""Ragged scan: a recurrence over a flat batch in XLA operations, token by token or in chunks.

`scan_tokens` is the definition, and faster on CPUs. `scan_chunks` advances all sequences with a
single token at once (decoding) and the others chunk by chunk in parallel forms (prompts), in a loop
over the existing chunks. `scan_text`, for derivatives, has a fixed number of chunks.
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
    from jaxtyping import Bool, Float, Int

# (state, a token's inputs) -> (state, output).
type TokenStep = Callable[[Array, Any], tuple[Array, Array]]
# (state, inputs [size, ...], which tokens are real) -> (state, outputs [size, ...]). Inputs of
# tokens that are not real are zero.
type ChunkStep = Callable[[Array, Any, Array], tuple[Array, Array]]


def ragged_scan(
    step: TokenStep,
    chunk: ChunkStep,
    size: int,
    inputs: Any,
    table: Float[Array, "slots ..."],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens ..."], Float[Array, "slots ..."]]:
    """Runs a recurrence over a flat batch.

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
        on_copies = SequenceRuns(*runs)._replace(slots=own, copies=jnp.full_like(runs.rows, -1))
        return ragged_scan(step, chunk, size, inputs, table[runs.slots], on_copies)[0], table
    if needs_derivatives():
        return scan_text(chunk, size, inputs, table, runs)
    if backend() == "cpu":
        return scan_tokens(step, inputs, table, runs)
    return scan_chunks(step, chunk, size, inputs, table, runs)


def scan_tokens(
    step: TokenStep, inputs: Any, table: Float[Array, "slots ..."], runs: SequenceRuns
) -> tuple[Float[Array, "tokens ..."], Float[Array, "slots ..."]]:
    """Computes `ragged_scan` one token after the other."""
    tokens = jnp.arange(runs.rows.shape[0], dtype=jnp.int32)

    def advance(table: Array, token: tuple[Array, Array, Array, Any]) -> tuple[Array, Array]:
        at, row, copy, values = token
        run = jnp.maximum(row, 0)
        slot = runs.slots[run]
        begins = runs.fresh[run] & (runs.starts[run] == at)
        before = jnp.where(begins, 0.0, table[slot])
        after, out = step(before, values)
        # Padding writes nothing.
        written = jnp.where(row < 0, table.shape[0], jnp.stack([slot, _or_none(copy, table)]))
        return table.at[written].set(after[None], mode="drop"), jnp.where(row < 0, 0.0, out)

    table, out = lax.scan(advance, table, (tokens, runs.rows, runs.copies, inputs))
    return out, table


def scan_chunks(
    step: TokenStep,
    chunk: ChunkStep,
    size: int,
    inputs: Any,
    table: Float[Array, "slots ..."],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens ..."], Float[Array, "slots ..."]]:
    """Computes `ragged_scan`: single tokens by one vectorized step, longer runs in chunks."""
    out, table = _single_tokens(step, inputs, table, runs)
    here, tokens = jnp.arange(size, dtype=jnp.int32), out.shape[0]
    indices = jnp.arange(tokens, dtype=jnp.int32)
    long = (runs.rows >= 0) & (runs.lengths[jnp.maximum(runs.rows, 0)] > 1)
    # From each index on: the first token of a long run, and the first token whose state is copied.
    begin, copied = (
        lax.cummin(jnp.where(mask, indices, tokens), reverse=True)
        for mask in (long, runs.copies >= 0)
    )

    def advance_chunk(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        at, out, table = carry
        run = runs.rows[at]
        end = jnp.minimum(at + size, runs.starts[run] + runs.lengths[run])
        end = jnp.minimum(end, copied[at] + 1)
        real = here < end - at
        indices = jnp.where(real, at + here, tokens)
        gathered = jax.tree.map(lambda x: x.at[indices].get(mode="fill", fill_value=0), inputs)
        slot = runs.slots[run]
        before = jnp.where(runs.fresh[run] & (at == runs.starts[run]), 0.0, table[slot])
        after, values = chunk(before, gathered, real)
        written = jnp.stack([slot, _or_none(runs.copies[end - 1], table)])
        table = table.at[written].set(after[None], mode="drop")
        following = begin.at[end].get(mode="fill", fill_value=tokens)
        return following, out.at[indices].set(values, mode="drop"), table

    more = lambda carry: carry[0] < tokens  # noqa: E731
    return lax.while_loop(more, advance_chunk, (begin[0], out, table))[1:]


def scan_text(
    chunk: ChunkStep,
    size: int,
    inputs: Any,
    table: Float[Array, "slots ..."],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens ..."], Float[Array, "slots ..."]]:
    """Computes `ragged_scan` of a single sequence differentiably, in a fixed number of chunks."""
    assert runs.slots.shape == (1,), "a whole text"
    tokens = runs.rows.shape[0]
    count = -(-tokens // size)
    real = runs.rows >= 0

    def cut(x: Array) -> Array:
        more = [(0, count * size - tokens)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, more).reshape(count, size, *x.shape[1:])

    def advance(state: Array, part: tuple[Array, Any]) -> tuple[Array, Array]:
        return chunk(state, part[1], part[0])

    masked = jax.tree.map(lambda x: jnp.where(_as_rows(real, x), x, jnp.zeros_like(x)), inputs)
    before = jnp.where(runs.fresh[0], 0.0, table[runs.slots[0]])
    after, out = lax.scan(advance, before, (cut(real), jax.tree.map(cut, masked)))
    out = out.reshape(count * size, *out.shape[2:])[:tokens]
    return jnp.where(_as_rows(real, out), out, 0.0), table.at[runs.slots].set(after[None])


def _single_tokens(
    step: TokenStep, inputs: Any, table: Array, runs: SequenceRuns
) -> tuple[Array, Array]:
    """Advances the runs of one token each; all other outputs are zero."""
    single = runs.lengths == 1
    before = table[jnp.where(single, runs.slots, 0)]
    before = jnp.where(_as_rows(runs.fresh, before), 0.0, before)
    after, values = jax.vmap(step)(before, jax.tree.map(lambda x: x[runs.starts], inputs))
    tokens = runs.rows.shape[0]
    out = jnp.zeros((tokens, *values.shape[1:]), values.dtype)
    out = out.at[jnp.where(single, runs.starts, tokens)].set(values, mode="drop")
    for slots in (runs.slots, _or_none(runs.copies[runs.starts], table)):
        table = table.at[jnp.where(single, slots, table.shape[0])].set(after, mode="drop")
    return out, table


def _or_none(copies: Int[Array, "*runs"], table: Array) -> Int[Array, "*runs"]:
    """Returns slots of copies; an out-of-range slot, which is dropped, replaces -1."""
    return jnp.where(copies < 0, table.shape[0], copies)


def _as_rows(flags: Bool[Array, " rows"], like: Array) -> Array:
    return flags.reshape(flags.shape + (1,) * (like.ndim - 1))


def _empty(step: TokenStep, inputs: Any, table: Array) -> Array:
    token = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), inputs)
    state = jax.ShapeDtypeStruct(table.shape[1:], table.dtype)
    out = jax.eval_shape(step, state, token)[1]
    return jnp.zeros((0, *out.shape), out.dtype)

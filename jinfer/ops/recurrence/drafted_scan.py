"""Speculative decoding with recurrent states: drafted tokens are scanned again once accepted.

A state is overwritten by each token, so it cannot go back to before a rejected one. Verification
therefore only reads the state table. Instead of a new table it returns the scan with its inputs.
Once the number of accepted tokens of each sequence is known, the scan alone runs again over them,
from the old state. No projection is computed twice, only the inputs of a few tokens are held, and
the state equals that of decoding the same tokens, to the bit with custom calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.ops.attention.kv_cache import Cache
from jinfer.ops.recurrence.sequence_runs import DraftRuns, SequenceRuns


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftedScan:
    """A state table, and a deferred scan of drafted tokens that will update it.

    Attributes:
        scan: the recurrence.
        inputs: its arguments before the table.
        table: the states before the tokens.
    """

    scan: Callable[..., tuple[Array, Any]] = field(metadata={"static": True})
    inputs: tuple[Any, ...]
    table: Array


def keeps_drafted_states[**P](
    scan: Callable[P, tuple[Array, Any]],
) -> Callable[P, tuple[Array, Any]]:
    """Makes a recurrence return a `DraftedScan` instead of the table for `DraftRuns`.

    Args:
        scan: (*inputs, table, runs) -> (outputs, table). Operations before its custom call run
            twice, and may have other bits the second time.
    """

    @wraps(scan)
    def scan_or_defer(*arguments: P.args, **named: P.kwargs) -> tuple[Array, Any]:
        positional: tuple[Any, ...] = arguments
        *inputs, table, runs = positional
        out, after = scan(*arguments, **named)
        if isinstance(runs, DraftRuns):
            after = DraftedScan(scan, tuple(inputs), table)
        return out, after

    return scan_or_defer


def accept_drafted(cache: Cache, runs: SequenceRuns, accepted: Array) -> Cache:
    """Applies the deferred scans of a cache from verification to the accepted tokens.

    Args:
        runs: runs of the verification.
        accepted: number of accepted tokens of each run.
    """
    lengths, run = jnp.minimum(runs.lengths, accepted), jnp.maximum(runs.rows, 0)
    here = jnp.arange(runs.rows.shape[0], dtype=jnp.int32) - runs.starts[run]
    rows, copies = (jnp.where(here < lengths[run], x, -1) for x in (runs.rows, runs.copies))
    runs = SequenceRuns(*runs)._replace(rows=rows, lengths=lengths, copies=copies)

    def after(part: Any) -> Any:
        if isinstance(part, DraftedScan):
            return part.scan(*part.inputs, part.table, runs)[1]
        return part

    return jax.tree.map(after, cache, is_leaf=_is_drafted)


def split_inputs(cache: Cache) -> tuple[Cache, tuple[Any, ...]]:
    """Splits a cache from verification into the cache without its scans' inputs, and the inputs.

    The cache alone has buffers that the accepted cache can be written to.
    """
    kept = jax.tree.map(
        lambda part: replace(part, inputs=()) if _is_drafted(part) else part,
        cache,
        is_leaf=_is_drafted,
    )
    parts = jax.tree.leaves(cache, is_leaf=_is_drafted)
    return kept, tuple(part.inputs for part in parts if _is_drafted(part))


def join_inputs(cache: Cache, inputs: tuple[Any, ...]) -> Cache:
    """Inverts `split_inputs`."""
    rest = iter(inputs)
    return jax.tree.map(
        lambda part: replace(part, inputs=next(rest)) if _is_drafted(part) else part,
        cache,
        is_leaf=_is_drafted,
    )


def _is_drafted(part: Any) -> bool:
    return isinstance(part, DraftedScan)

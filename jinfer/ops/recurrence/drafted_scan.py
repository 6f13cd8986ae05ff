"""Speculative decoding with recurrent states: drafted tokens are scanned again once accepted.

A state is overwritten by each token, so it cannot go back to before a rejected one. Verification
therefore only reads the state table. What it leaves in the table's place is the scan with its
inputs, and when it is known how many tokens of each sequence are accepted, the scan alone runs
again over those, from the old state. No projection is computed twice, nothing but the inputs of a
few tokens is held, and the state is that of decoding the same tokens, to the bit where custom calls
compute.
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
    """A state table, and a scan of drafted tokens that is yet to change it.

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
    """A recurrence that returns a `DraftedScan` in place of the table for `DraftRuns`.

    Args:
        scan: (*inputs, table, runs) -> (outputs, table). What it computes before a custom call is
            computed twice, and may have other bits the second time.
    """

    @wraps(scan)
    def scan_or_defer(*arguments: P.args, **named: P.kwargs) -> tuple[Array, Any]:
        given: tuple[Any, ...] = arguments
        *inputs, table, runs = given
        out, after = scan(*arguments, **named)
        if isinstance(runs, DraftRuns):
            after = DraftedScan(scan, tuple(inputs), table)
        return out, after

    return scan_or_defer


def accept_drafted(cache: Cache, runs: SequenceRuns, accepted: Array) -> Cache:
    """The cache after the first tokens of each run, of a cache that verification has returned.

    Args:
        runs: those of the verification.
        accepted: tokens of each run.
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
    """A cache that verification has returned, without its scans' inputs, and these.

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
    """The cache of which `split_inputs` has made these."""
    rest = iter(inputs)
    return jax.tree.map(
        lambda part: replace(part, inputs=next(rest)) if _is_drafted(part) else part,
        cache,
        is_leaf=_is_drafted,
    )


def _is_drafted(part: Any) -> bool:
    return isinstance(part, DraftedScan)

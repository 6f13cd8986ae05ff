"""Selective scan: the state space of Mamba-1 (arXiv 2312.00752)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array

from jinfer.cpu import recurrence_call as custom
from jinfer.ops.recurrence.diagonal_state import DIAGONAL_CHUNK, diagonal_states
from jinfer.ops.recurrence.drafted_scan import keeps_drafted_states
from jinfer.ops.recurrence.ragged_scan import ChunkStep, Step, ragged_scan
from jinfer.ops.recurrence.sequence_runs import SequenceRuns, custom_runs

if TYPE_CHECKING:
    from jaxtyping import Float


class _Token(NamedTuple):
    x: Array
    dt: Array
    b: Array
    c: Array


@keeps_drafted_states
def selective_scan(
    x: Float[Array, "tokens channels"],
    dt: Float[Array, "tokens channels"],
    a: Float[Array, "states channels"],
    b: Float[Array, "tokens states"],
    c: Float[Array, "tokens states"],
    d: Float[Array, " channels"] | None,
    table: Float[Array, "slots states channels"],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens channels"], Float[Array, "slots states channels"]]:
    """h = exp(dt a) h + b (dt x); the output is c h + d x. All float32.

    Args:
        dt: step sizes, after softplus.
        a: -exp(A_log), transposed.
        table: may be donated.
    """
    if (at := custom_runs(runs)) is not None:
        y, table = custom.selective_scan(x, dt, a, b, c, table, at)
    else:
        step, chunk = _forms(a)
        tokens = _Token(x, dt, b, c)
        y, table = ragged_scan(step, chunk, DIAGONAL_CHUNK, tokens, table, runs)
    return (y if d is None else y + d[None] * x), table


def _forms(a: Array) -> tuple[Step, ChunkStep]:
    def step(state: Array, token: _Token) -> tuple[Array, Array]:
        x = token.b[:, None] * (token.dt * token.x)[None]
        after = jnp.exp(token.dt[None] * a) * state + x
        return after, jnp.sum(token.c[:, None] * after, axis=0)

    def chunk(state: Array, token: _Token, real: Array) -> tuple[Array, Array]:
        x = token.b[..., None] * (token.dt * token.x)[:, None]
        states = diagonal_states(state, token.dt[:, None] * a[None], x)
        return states[-1], jnp.sum(token.c[..., None] * states, axis=1)

    return step, chunk

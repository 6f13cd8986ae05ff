"""Diagonal recurrences h = a h + b: RG-LRU (arXiv 2402.19427), selective scan (Mamba-1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jinfer.cpu import recurrence_call as custom
from jinfer.ops.activation import activate
from jinfer.ops.recurrence.drafted_scan import keeps_drafted_states
from jinfer.ops.recurrence.ragged_scan import ChunkStep, TokenStep, ragged_scan
from jinfer.ops.recurrence.sequence_runs import SequenceRuns, custom_runs, is_first

if TYPE_CHECKING:
    from jaxtyping import Float

DIAGONAL_CHUNK = 32  # tokens of which all states are held at a time


def diagonal_states(
    before: Float[Array, "states ..."],
    log_decay: Float[Array, "size ..."],
    x: Float[Array, "size ..."],
) -> Float[Array, "size ..."]:
    """Computes the states after each token of a chunk by an associative scan."""

    def combine(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    decays, sums = lax.associative_scan(combine, (jnp.exp(log_decay), x))
    return decays * before[None] + sums


_SHARPNESS = 8.0  # the paper's c


def rg_lru(
    x: Float[Array, "tokens width"],
    input_gate: Float[Array, "tokens width"],
    recurrence_gate: Float[Array, "tokens width"],
    parameter: Float[Array, " width"],
    table: Float[Array, "slots width"],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens width"], Float[Array, "slots width"]]:
    """RG-LRU (arXiv 2402.19427), in float32: h = a h + sqrt(1 - a^2) (input_gate x).

    log a = -8 recurrence_gate softplus(parameter). The output is h; a sequence's first token is not
    scaled by the root.

    Args:
        input_gate, recurrence_gate: after their sigmoids.
        table: may be donated.
    """
    return _scan(*_inputs(x, input_gate, recurrence_gate, parameter, runs), table, runs)


@keeps_drafted_states
def _scan(log_decay: Array, x: Array, table: Array, runs: SequenceRuns) -> tuple[Array, Array]:
    if (at := custom_runs(runs)) is not None:
        return custom.diagonal_scan(log_decay, x, table, at)
    return ragged_scan(_step, _chunk, DIAGONAL_CHUNK, (log_decay, x), table, runs)


def _inputs(
    x: Array, input_gate: Array, recurrence_gate: Array, parameter: Array, runs: SequenceRuns
) -> tuple[Array, Array]:
    log_decay = -_SHARPNESS * recurrence_gate * activate("softplus", parameter)[None]
    root = jnp.sqrt(-jnp.expm1(2.0 * log_decay))  # 1 - a^2, without cancellation
    return log_decay, jnp.where(is_first(runs)[:, None], 1.0, root) * (input_gate * x)


def _step(state: Array, token: tuple[Array, Array]) -> tuple[Array, Array]:
    log_decay, x = token
    after = jnp.exp(log_decay) * state + x
    return after, after


def _chunk(state: Array, tokens: tuple[Array, Array], real: Array) -> tuple[Array, Array]:
    states = diagonal_states(state, *tokens)
    return states[-1], states


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
    """Selective scan (arXiv 2312.00752): h = exp(dt a) h + b (dt x), output c h + d x. All float32.

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


def _forms(a: Array) -> tuple[TokenStep, ChunkStep]:
    def step(state: Array, token: _Token) -> tuple[Array, Array]:
        x = token.b[:, None] * (token.dt * token.x)[None]
        after = jnp.exp(token.dt[None] * a) * state + x
        return after, jnp.sum(token.c[:, None] * after, axis=0)

    def chunk(state: Array, token: _Token, real: Array) -> tuple[Array, Array]:
        x = token.b[..., None] * (token.dt * token.x)[:, None]
        states = diagonal_states(state, token.dt[:, None] * a[None], x)
        return states[-1], jnp.sum(token.c[..., None] * states, axis=1)

    return step, chunk

"""RG-LRU: the real-gated linear recurrent unit of Griffin and RecurrentGemma (arXiv 2402.19427)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jinfer.cpu import recurrence_call as custom
from jinfer.ops.activation import activate
from jinfer.ops.recurrence.diagonal_state import DIAGONAL_CHUNK, diagonal_states
from jinfer.ops.recurrence.drafted_scan import keeps_drafted_states
from jinfer.ops.recurrence.ragged_scan import ragged_scan
from jinfer.ops.recurrence.sequence_runs import SequenceRuns, custom_runs, is_first

if TYPE_CHECKING:
    from jaxtyping import Float

_SHARPNESS = 8.0  # the paper's c


def rg_lru(
    x: Float[Array, "tokens width"],
    input_gate: Float[Array, "tokens width"],
    recurrence_gate: Float[Array, "tokens width"],
    parameter: Float[Array, " width"],
    table: Float[Array, "slots width"],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens width"], Float[Array, "slots width"]]:
    """h = a h + sqrt(1 - a^2) (input_gate x) with log a = -8 recurrence_gate softplus(parameter).

    The output is h; a sequence's first token is not scaled by the root. All float32.

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

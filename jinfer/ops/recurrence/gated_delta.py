"""Gated delta rule: gated delta net (arXiv 2412.06464) and KDA (Kimi Linear, arXiv 2510.26692)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax import Array

from jinfer.ops.recurrence.matrix_state import Delta, MatrixInputs, matrix_scan
from jinfer.ops.recurrence.sequence_runs import SequenceRuns

if TYPE_CHECKING:
    from jaxtyping import Float


def gated_delta(
    q: Float[Array, "tokens key_heads key_dim"],
    k: Float[Array, "tokens key_heads key_dim"],
    v: Float[Array, "tokens heads value_dim"],
    log_decay: Float[Array, "tokens heads *key_dim"],
    beta: Float[Array, "tokens heads"],
    table: Float[Array, "slots heads key_dim value_dim"],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "slots heads key_dim value_dim"]]:
    """S = exp(log_decay) S; S = S + k beta (v - k S); the output is q S. All float32.

    Args:
        q, k: normalized and scaled; key heads serve heads / key_heads consecutive heads.
        log_decay: at most 0; one a head (gated delta net) or one a row of S (KDA).
        beta: what share of the value under k is replaced.
        table: may be donated.
    """
    return matrix_scan(MatrixInputs(q, k, v, log_decay, Delta(beta)), table, runs)

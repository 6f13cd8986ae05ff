"""RWKV-7 time mixing: decay a row and a generalized delta rule (arXiv 2503.14456)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax import Array

from jinfer.ops.recurrence.matrix_state import LowRank, MatrixInputs, matrix_scan
from jinfer.ops.recurrence.sequence_runs import SequenceRuns

if TYPE_CHECKING:
    from jaxtyping import Float


def rwkv7(
    r: Float[Array, "tokens heads key_dim"],
    log_decay: Float[Array, "tokens heads key_dim"],
    k: Float[Array, "tokens heads key_dim"],
    v: Float[Array, "tokens heads value_dim"],
    removal: Float[Array, "tokens heads key_dim"],
    rate: Float[Array, "tokens heads key_dim"],
    table: Float[Array, "slots heads key_dim value_dim"],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "slots heads key_dim value_dim"]]:
    """S = exp(log_decay) S - (removal rate) (removal S) + k v; the output is r S. All float32.

    The state is the paper's transposed, [key_dim, value_dim].

    Args:
        log_decay: log w, at most 0.
        removal: the normalized removal key kappa, which sees S before the token.
        rate: in-context learning rates, the paper's a.
        table: may be donated.
    """
    erase = LowRank(removal, -removal * rate)
    return matrix_scan(MatrixInputs(r, k, v, log_decay, erase), table, runs)

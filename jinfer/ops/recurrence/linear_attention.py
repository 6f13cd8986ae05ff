"""Linear attention with a fixed decay a head: lightning attention (arXiv 2405.17381)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jinfer.ops.recurrence.matrix_state import MatrixInputs, matrix_scan
from jinfer.ops.recurrence.sequence_runs import SequenceRuns

if TYPE_CHECKING:
    from jaxtyping import Float


def linear_attention(
    q: Float[Array, "tokens key_heads key_dim"],
    k: Float[Array, "tokens key_heads key_dim"],
    v: Float[Array, "tokens heads value_dim"],
    slopes: Float[Array, " heads"],
    table: Float[Array, "slots heads key_dim value_dim"],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "slots heads key_dim value_dim"]]:
    """S = exp(-slope) S + k v; the output is q S. All float32.

    Args:
        slopes: at least 0; see `lightning_slopes`.
        table: may be donated.
    """
    log_decay = jnp.broadcast_to(-slopes[None], v.shape[:2])
    return matrix_scan(MatrixInputs(q, k, v, log_decay), table, runs)


def lightning_slopes(heads: int, layer: int, layers: int) -> list[float]:
    """The slope of each head in a layer (MiniMax-Text-01): later layers decay more slowly."""
    return [
        2.0 ** (-8.0 * (head + 1) / heads) * (1.0 - layer / (layers - 1 + 1e-5) + 1e-5)
        for head in range(heads)
    ]

"""SSD: the scan of Mamba-2, state space duality (arXiv 2405.21060)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jinfer.ops.activation import activate
from jinfer.ops.recurrence.matrix_state import MatrixInputs, matrix_scan
from jinfer.ops.recurrence.sequence_runs import SequenceRuns

if TYPE_CHECKING:
    from jaxtyping import Float


def ssd(
    x: Float[Array, "tokens heads width"],
    dt: Float[Array, "tokens heads"],
    a: Float[Array, " heads"],
    b: Float[Array, "tokens groups states"],
    c: Float[Array, "tokens groups states"],
    d: Float[Array, " heads"] | None,
    table: Float[Array, "slots heads states width"],
    runs: SequenceRuns,
) -> tuple[Float[Array, "tokens heads width"], Float[Array, "slots heads states width"]]:
    """S = exp(dt a) S + b (dt x); the output is c S + d x. All float32.

    Args:
        dt: step sizes, after softplus and limits.
        a: -exp(A_log).
        b, c: shared by heads / groups consecutive heads.
        table: may be donated.
    """
    inputs = MatrixInputs(c, b, dt[..., None] * x, dt * a[None])
    y, table = matrix_scan(inputs, table, runs)
    return (y if d is None else y + d[None, :, None] * x), table


def step_size(
    dt: Float[Array, "tokens heads"],
    bias: Float[Array, " heads"],
    limits: tuple[float, float] = (0.0, float("inf")),
) -> Float[Array, "tokens heads"]:
    """softplus(dt + bias) within limits, in float32."""
    wide = dt.astype(jnp.float32) + bias.astype(jnp.float32)[None]
    return jnp.clip(activate("softplus", wide), *limits)

"""Gaussian top-k: activation sparsity by a threshold from a row's mean and deviation (Gemma 3n)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.ops.row_sums import mean_of_row, rounded

if TYPE_CHECKING:
    from jaxtyping import Float


def gaussian_sparsity(
    x: Float[Array, "*rows width"], threshold: float
) -> Float[Array, "*rows width"]:
    """max(0, x - mean - deviation * threshold), in float32."""
    wide = x.astype(jnp.float32)
    mean = mean_of_row(wide)
    deviation = jnp.sqrt(mean_of_row(jnp.square(wide - mean)))
    least = mean + rounded(deviation * threshold)
    return jax.nn.relu(wide - least).astype(x.dtype)

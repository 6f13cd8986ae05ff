"""Gaussian top-k: activation sparsity by a threshold from a row's mean and deviation (Gemma 3n)."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.ops.row_sums import mean_of_row, rounded

if TYPE_CHECKING:
    from jaxtyping import Float


def gaussian_sparsity(x: Float[Array, "*rows width"], share: float) -> Float[Array, "*rows width"]:
    """max(0, x - mean - deviation * quantile(share)), in float32.

    Args:
        share: of the numbers that become 0, were they normally distributed; above 0, below 1.
    """
    wide = x.astype(jnp.float32)
    mean = mean_of_row(wide)
    deviation = jnp.sqrt(mean_of_row(jnp.square(wide - mean)))
    least = mean + rounded(deviation * NormalDist().inv_cdf(share))
    return jax.nn.relu(wide - least).astype(x.dtype)

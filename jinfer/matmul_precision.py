"""Matmul precision: float32 products in full precision, where a GPU would use TF32."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def matmul_precision(x: Array) -> lax.Precision | None:
    """The `precision` argument for products of x: HIGHEST for float32, else the default."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def matmul(a: Array, b: Array) -> Array:
    """a @ b, in full precision for float32."""
    return jnp.matmul(a, b, precision=matmul_precision(a))

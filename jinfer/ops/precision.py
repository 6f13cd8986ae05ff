"""How exactly float32 is multiplied."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def precision_of(x: Array) -> lax.Precision | None:
    """For products of x: of float32 all bits, where a GPU would leave 10 of the 23 (TF32)."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

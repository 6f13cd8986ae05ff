"""Parameters with logical axis names, by which they are sharded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jinfer.modelspec.quantization_table import Role


def parameter(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    dtype: DTypeLike,
    *,
    normalize: bool = False,
    role: Role = "plain",
) -> nnx.Param:
    """A parameter to be loaded: until then only shape and type, and nothing is traced.

    Args:
        axes: the logical name of each axis; sharding is decided by these names.
        normalize: normalize its rows to length 1 at loading.
        role: what it is used for.
    """
    value = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return nnx.Param(value, axes=axes, normalize=normalize, role=role)

"""Parameters: arrays with a name for each axis."""

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
    """A parameter to be loaded; until then it is a shape and a type, and nothing is traced.

    Args:
        axes: the logical name of each axis; partitioning is decided by these names.
        normalize: its rows are brought to length 1 when they are loaded.
        role: what it is used for.
    """
    value = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return nnx.Param(value, axes=axes, normalize=normalize, role=role)

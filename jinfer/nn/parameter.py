"""Parameters: arrays with a name for each axis."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

# What a parameter is used for, which decides how it may be stored: "matrix" and "head" are only
# multiplied with (the head gives logits), rows of a "table" are looked up, "plain" is all else.
Role = Literal["plain", "matrix", "table", "head"]


def parameter(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    dtype: DTypeLike,
    *,
    normalize: bool = False,
    role: Role = "plain",
) -> nnx.Param:
    """A parameter to be loaded.

    Args:
        axes: the logical name of each axis; partitioning is decided by these names.
        normalize: its rows are brought to length 1 when they are loaded.
        role: what it is used for.
    """
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes, normalize=normalize, role=role)

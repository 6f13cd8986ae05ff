"""Uninitialised arrays, like `numpy.empty`: memory is taken as it is written to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np
from jax import Array

from jinfer.cpu.build_library import register

if TYPE_CHECKING:
    from jax.typing import DTypeLike


def available() -> bool:
    """Whether the custom call exists on this machine; compiles it the first time."""
    return register("jinfer_empty")


def empty(shape: tuple[int, ...], dtype: DTypeLike, which: int) -> Array:
    """An array of undefined content.

    Args:
        which: different for each call of a program. XLA merges equal calls and copies the result,
            which would write all of it.
    """
    like = jax.ShapeDtypeStruct(shape, np.dtype(dtype))
    return jax.ffi.ffi_call("jinfer_empty", like)(which=np.int32(which))

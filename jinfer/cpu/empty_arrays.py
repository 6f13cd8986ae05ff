"""Arrays that nobody has written to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np
from jax import Array

from jinfer.cpu.build_library import register

if TYPE_CHECKING:
    from jax.typing import DTypeLike


def available() -> bool:
    """Whether there is such a custom call on this machine."""
    return register("jinfer_unwritten")


def unwritten(shape: tuple[int, ...], dtype: DTypeLike, which: int) -> Array:
    """An array that may hold anything; it takes memory where it is written to.

    Args:
        which: of a program's own. Two calls that are the same XLA makes one, and then copies what
            it gives: all of it is written to.
    """
    like = jax.ShapeDtypeStruct(shape, np.dtype(dtype))
    return jax.ffi.ffi_call("jinfer_unwritten", like)(which=np.int32(which))

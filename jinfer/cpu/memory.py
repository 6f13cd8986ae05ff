"""Arrays that nobody has written to."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jinfer.cpu.build import register


def available() -> bool:
    """Whether there is such a custom call on this machine."""
    return register("jinfer_unwritten")


@partial(jax.jit, static_argnums=(0, 1))
def unwritten(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """An array that may hold anything; it takes memory where it is written to."""
    return jax.ffi.ffi_call("jinfer_unwritten", jax.ShapeDtypeStruct(shape, np.dtype(dtype)))()

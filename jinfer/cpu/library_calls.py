"""Library functions called from Python: thread limit, interrupt flags, memory bandwidth."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.cpu import build_library
from jinfer.cpu.build_library import loaded
from jinfer.cpu.cores import limits, max_threads

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

_keys = count()


def limit_threads(threads: int) -> Callable[[], None]:
    """Limits the threads of custom calls, in the whole process, until the result is called.

    The lowest limit in force applies.
    """
    key = next(_keys)
    limits[key] = threads
    _apply()

    def lift() -> None:
        limits.pop(key, None)
        _apply()

    return lift


def _apply() -> None:
    if (library := build_library.opened_already()) is not None:
        library.jinfer_limit_threads(max_threads())


_FLAGS = 1024  # as in interrupt.cc; a shared flag only ends loops early more often
_numbers = count()


def interrupted(flag: Int[Array, ""], step: Int[Array, ""]) -> Bool[Array, ""]:
    """Whether a flag is raised, before a step of a loop.

    Args:
        flag: `Flag.number`.
        step: the loop's counter, which keeps the call from being hoisted out of the loop.
    """
    result = jax.ShapeDtypeStruct((), jnp.bool_)
    return build_library.custom_call("jinfer_interrupted", result)(flag, step)


class Flag:
    """A flag that any thread may raise and lower.

    Attributes:
        number: identifies the flag in programs.
    """

    def __init__(self) -> None:
        self.number = next(_numbers) % _FLAGS

    def set(self, raised: bool) -> None:
        """Raises or lowers the flag; does nothing without a library, as no program polls then."""
        if (library := build_library.opened_already()) is not None:
            library.jinfer_set_interrupt(self.number, raised)


AHEAD = (0, 24 << 10)  # prefetch distances in bytes; which is faster depends on the processor


def read_memory(array: np.ndarray, ahead: int) -> int:
    """Computes the bitwise OR of one word in each 64 bytes of an array; releases the GIL.

    Args:
        array: contiguous.
        ahead: prefetch distance, one of `AHEAD`.

    Raises:
        RuntimeError: there are no custom calls.
    """
    call = loaded().jinfer_read_bandwidth
    call.restype = ctypes.c_uint64
    return call(
        ctypes.c_void_p(array.ctypes.data), ctypes.c_int64(array.nbytes), ctypes.c_int64(ahead)
    )

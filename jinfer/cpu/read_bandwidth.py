"""Reading of memory as products with few rows read their weights, and nothing else."""

from __future__ import annotations

import ctypes

import numpy as np

from jinfer.cpu import build_library

# Bytes that are fetched before they are read: some processors read faster so, others by themselves.
AHEAD = (0, 24 << 10)


def available() -> bool:
    """Whether there is a library on this machine."""
    return build_library.available()


def read(array: np.ndarray, ahead: int) -> int:
    """A word of each 64 bytes of an array, ORed; other threads of Python run meanwhile.

    Args:
        array: contiguous.
        ahead: one of `AHEAD`.
    """
    library = build_library.opened_already()
    if library is None:
        raise RuntimeError("there are no custom calls on this machine")
    call = library.jinfer_read
    call.restype = ctypes.c_uint64
    return call(
        ctypes.c_void_p(array.ctypes.data), ctypes.c_int64(array.nbytes), ctypes.c_int64(ahead)
    )

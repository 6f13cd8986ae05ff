"""Memory bandwidth: reads an array as a GEMV reads its weights, and does nothing else."""

from __future__ import annotations

import ctypes

import numpy as np

from jinfer.cpu import build_library

AHEAD = (0, 24 << 10)  # prefetch distances in bytes; which is faster depends on the processor


def available() -> bool:
    """Whether there is a library on this machine; compiles it the first time."""
    return build_library.available()


def read(array: np.ndarray, ahead: int) -> int:
    """The bitwise OR of one word of each 64 bytes of an array; releases the GIL.

    Args:
        array: contiguous.
        ahead: prefetch distance, one of `AHEAD`.

    Raises:
        RuntimeError: there is no library in use.
    """
    library = build_library.opened_already()
    if library is None:
        raise RuntimeError("there are no custom calls on this machine")
    call = library.jinfer_read_bandwidth
    call.restype = ctypes.c_uint64
    return call(
        ctypes.c_void_p(array.ctypes.data), ctypes.c_int64(array.nbytes), ctypes.c_int64(ahead)
    )

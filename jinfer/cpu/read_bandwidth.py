"""Memory bandwidth: reads an array as a GEMV reads its weights, and does nothing else."""

from __future__ import annotations

import ctypes

import numpy as np

from jinfer.cpu.build_library import loaded

AHEAD = (0, 24 << 10)  # prefetch distances in bytes; which is faster depends on the processor


def read(array: np.ndarray, ahead: int) -> int:
    """The bitwise OR of one word of each 64 bytes of an array; releases the GIL.

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

"""Weights that are NaN or infinite: found while they are read, at a fraction of what a copy takes.

As integers, all that is not finite is above the bits of infinity: seen with a sign for the numbers
above 0, seen without for those below. So two maxima find it, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from jinfer.loader.weights.tensor_mapping import LoadError, Origin

_PIECE = 1 << 20  # bytes, which stay in the cache for the second maximum


def count_nonfinite(values: np.ndarray) -> int:
    """How many numbers of an array are NaN or infinite; 0 for integers."""
    return sum(int(np.count_nonzero(~np.isfinite(piece))) for piece in _with_nonfinite(values))


def _with_nonfinite(values: np.ndarray) -> Iterator[np.ndarray]:
    """The pieces of an array that have NaN or infinity in them."""
    kind = values.dtype
    if not _is_float(kind):
        return
    size = kind.itemsize
    signed, unsigned = np.dtype(f"i{size}"), np.dtype(f"u{size}")
    limits = ml_dtypes.finfo(kind)
    most = int(np.array(limits.max, kind).view(unsigned))  # the next one is infinity, or NaN
    least = int(np.array(limits.min, kind).view(unsigned))
    flat = np.ascontiguousarray(values).reshape(-1)
    for begin in range(0, flat.size, _PIECE // size):
        piece = flat[begin : begin + _PIECE // size]
        if piece.view(signed).max() > most or piece.view(unsigned).max() > least:
            yield piece


def _is_float(kind: np.dtype) -> bool:
    return kind.kind == "f" or (kind.kind == "V" and kind in _OTHER_FLOATS)


# Types of which all bits above the largest number are NaN or infinity, for both signs.
_OTHER_FLOATS = (
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2),
)


def nonfinite_tensor(origin: Origin) -> str:
    """The first tensor of a parameter that is not finite, with how many of its numbers."""
    for file in origin.files:
        if count := count_nonfinite(file.read()):
            return f"{file.name} has {count} numbers that are NaN or infinite"
    return f"{origin.parameter} has numbers that are infinite in the type that it is computed in"


def refuse_nonfinite(origin: Origin, values: np.ndarray) -> None:
    """Raises `LoadError` if values that are to be quantized are not finite: codes have no NaN."""
    if count_nonfinite(values):
        raise LoadError(
            f"{origin.path}: {nonfinite_tensor(origin)}, which cannot be quantized: get the file "
            f"again, or leave {origin.parameter} as it is: "
            f'quantization.rules = [{{ match = "{origin.parameter}", weights = "plain" }}]'
        )

"""Element types: safetensors' names, and NumPy's types for them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "C128": np.dtype(np.complex128),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}

# Several elements a byte, with the bits of one: their packing is not settled between writers.
SUB_BYTE = {"F4": 4, "F4_E2M1": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I4": 4, "U4": 4}


def is_bool(raw: np.ndarray) -> bool:
    """Whether every byte is 0 or 1: any other makes a NumPy bool array misbehave."""
    return raw.size == 0 or int(raw.max()) <= 1

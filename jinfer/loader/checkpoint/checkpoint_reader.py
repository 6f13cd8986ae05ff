"""Checkpoint: named tensors that are read lazily; every reader returns it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jinfer.loader.checkpoint.grouped_codes import GroupedCodes, ScaledValues
from jinfer.sandbox.sanitize import sanitized

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

# Types of less than a byte, with their bits: writers pack them differently.
SUB_BYTE = {"F4": 4, "F4_E2M1": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I4": 4, "U4": 4}


def is_bool(raw: np.ndarray) -> bool:
    """Whether every byte is 0 or 1: any other makes a NumPy bool array misbehave."""
    return raw.size == 0 or int(raw.max()) <= 1


Format = Literal["safetensors", "pickle", "gguf", "llama2c"]

ZIP_MAGIC = b"PK\x03\x04"  # the first bytes of PyTorch's archives


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file, the place and the reason.

    Attributes:
        path: the offending file.
        reason: the defect, and advice if there is any.
        offset: byte offset in the file, where one is known.
    """

    def __init__(self, path: Path | str, reason: str, offset: int | None = None) -> None:
        self.path = Path(path)
        self.reason = reason
        self.offset = offset
        where = f"{path}" if offset is None else f"{path}, byte {offset}"
        super().__init__(sanitized(f"{where}: {reason}"))


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint, which is not in memory until `read` or `raw` is called.

    Attributes:
        name: its name in the file.
        shape: logical shape, outermost dimension first (GGUF's order is reversed to this).
        type: its type in the file: "F32", "F16", "BF16", "F8_E4M3", "I64", "Q4_1", ...
        nbytes: its size in the file.
        read: its values, `shape`, in NumPy's or ml_dtypes' type of the same name; block formats
            are decoded to float32. A read-only view of the memory map where that is possible.
            Raises `CheckpointError`.
        raw: its stored bytes, uint8 [nbytes], a view of the memory map where that is possible.
        unreadable: the reason why `read` would raise; "" if it would not.
        codes: codes and scales, if a quantized checkpoint stores the matrix so.
        scaled: numbers and scales, if the matrix is stored in FP8.
        sources: the file's tensors that it is joined from, if there are several.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int
    read: Callable[[], np.ndarray] = field(repr=False)
    raw: Callable[[], np.ndarray] = field(repr=False)
    unreadable: str = ""
    codes: GroupedCodes | None = None
    scaled: ScaledValues | None = None
    sources: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: a file, or all shards of a model.

    Attributes:
        path: the file or folder it was opened from.
        format: the format of its files.
        tensors: name -> tensor, in the file's order.
        metadata: GGUF's key-value pairs, llama2.c's header, or safetensors' `__metadata__`.
        merged: digests of the adapters that are merged into its tensors on reading.
    """

    path: Path
    format: Format
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]
    merged: tuple[bytes, ...] = field(default=(), kw_only=True)

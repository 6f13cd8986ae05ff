"""Storages: the bytes beside a pickle, and tensors as strided views of them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import CheckpointError
from jinfer.loader.checkpoint.dtypes import DTYPES, is_bool
from jinfer.loader.checkpoint.mapped_file import MappedFile, as_array, element_count
from jinfer.loader.checkpoint.pickle_values import StridedTensor

# a view may repeat elements (stride 0); read, it may be as large as its storage or file, or this
_MAX_REPEATED_BYTES = 16 << 20


@dataclass(frozen=True)
class Extent:
    """Where bytes lie in a file: `stored` bytes from `offset`, `size` of them once inflated.

    Attributes:
        crc: CRC-32 of the inflated bytes; None where the bytes are stored as they are.
    """

    offset: int
    stored: int
    size: int
    crc: int | None = None


def read_extent(file: MappedFile, extent: Extent) -> np.ndarray:
    """The bytes of an extent, uint8 [size]: a view of the map, or inflated.

    Raises:
        CheckpointError: compressed bytes that are damaged or do not have the size they claim.
    """
    stored = file.view(extent.offset, extent.stored)
    if extent.crc is None:
        return stored
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        # one byte more than claimed, so that too many are seen without being made
        data = inflater.decompress(stored.data, extent.size + 1)
    except zlib.error as error:
        raise CheckpointError(
            file.path, f"compressed bytes are damaged: {error}", extent.offset
        ) from None
    if len(data) != extent.size or not inflater.eof or zlib.crc32(data) != extent.crc:
        reason = "compressed bytes do not have the size or checksum they claim"
        raise CheckpointError(file.path, reason, extent.offset)
    return np.frombuffer(data, np.uint8)


@dataclass
class Storages:
    """All storages of a file, by key.

    The last one inflated is kept: tensors that share it are usually read one after another.
    """

    file: MappedFile
    extents: Mapping[str, Extent]
    big_endian: bool = False
    _last: tuple[str, np.ndarray] | None = field(default=None, init=False, repr=False)

    def check(self, name: str, tensor: StridedTensor) -> int:
        """Elements of `tensor`, once it is certain that it can be read.

        Raises:
            CheckpointError: a storage that is missing or has another size, a view that reaches
                outside it or is too large.
        """

        def fail(reason: str) -> CheckpointError:
            where = extent.offset if extent else None
            return CheckpointError(self.file.path, f"tensor {name[:200]!r}: {reason}", where)

        storage = tensor.storage
        extent = self.extents.get(storage.key)
        if extent is None:
            raise fail(f"its storage {storage.key[:40]!r} is missing")
        if extent.size != storage.total:
            raise fail(f"its storage has {extent.size} bytes, {storage.total} are expected")
        if tensor.type != (storage.type or tensor.type):
            raise fail(f"is {tensor.type} over a storage of {storage.type}")
        itemsize = DTYPES[tensor.type].itemsize
        count = element_count(tensor.shape, itemsize)
        if count is None:
            raise fail("shape is too large")
        end = tensor.offset + _reach(tensor)
        if count and end * itemsize > storage.size:
            raise fail(f"reaches element {end} of a storage of {storage.size // itemsize}")
        if count * itemsize > max(storage.size, self.file.size, _MAX_REPEATED_BYTES):
            raise fail("repeats its elements more often than is read; save a contiguous tensor")
        return count

    def read(self, tensor: StridedTensor) -> np.ndarray:
        """Values of a tensor that `check` let pass: a read-only view where that is possible.

        Raises:
            CheckpointError: compressed bytes that are damaged, booleans that are neither 0 nor 1.
        """
        dtype, storage = DTYPES[tensor.type], tensor.storage
        count = math.prod(tensor.shape)
        used = _reach(tensor) * dtype.itemsize if count else 0
        start = storage.offset + tensor.offset * dtype.itemsize if count else 0
        raw = self._bytes(storage.key)[start : start + used]
        if tensor.type == "BOOL" and not is_bool(raw):
            reason = f"storage {storage.key!r}: a bool is neither 0 nor 1"
            raise CheckpointError(self.file.path, reason, self.extents[storage.key].offset)
        if self.big_endian:
            raw = _swapped(raw, dtype)
        if _is_contiguous(tensor):
            return as_array(raw, dtype, tensor.shape)
        aligned = as_array(raw, dtype, (used // dtype.itemsize,)).view(np.uint8)
        # a dimension of 1 may have any stride, even one that does not fit the machine's integers
        pairs = zip(tensor.shape, tensor.strides, strict=True)
        strides = [step * dtype.itemsize if size > 1 else 0 for size, step in pairs]
        # not as_strided, which asks NumPy for each type by name: ml_dtypes' float8_e5m2 has none
        return np.ndarray(tensor.shape, dtype, aligned.data, 0, strides)

    def _bytes(self, key: str) -> np.ndarray:
        extent, last = self.extents[key], self._last
        if extent.crc is None:
            return read_extent(self.file, extent)
        # one assignment, so that threads that read together see the whole pair or the old one
        if last is None or last[0] != key:
            last = self._last = (key, read_extent(self.file, extent))
        return last[1]


def raw_bytes(values: np.ndarray) -> np.ndarray:
    """Values as contiguous little-endian bytes, uint8 [nbytes]: a view where that is possible."""
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    raw.flags.writeable = False
    return raw


def _reach(tensor: StridedTensor) -> int:
    """Elements from the first to the last of the view, for a tensor with elements."""
    pairs = zip(tensor.shape, tensor.strides, strict=True)
    return 1 + sum((size - 1) * step for size, step in pairs)


def _is_contiguous(tensor: StridedTensor) -> bool:
    expected = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size == 0:
            return True
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def _swapped(raw: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Bytes of big-endian elements in little-endian order; a complex number is two floats."""
    unit = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    return raw.reshape(-1, unit)[:, ::-1].reshape(-1)

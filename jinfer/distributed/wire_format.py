"""Wire format: messages between ranks as JSON followed by the raw bytes of their arrays.

Received bytes are never executed (no pickle), and are checked against their declared lengths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from jax import Array

HEAD = 12  # bytes of the header: the lengths of JSON (4) and arrays (8), little-endian
_TEXT, _DATA = 64 << 20, 1 << 36  # largest JSON and arrays, in bytes
_LONGEST = 200  # characters of an error's reason
_ALIGNED = 64  # alignment of arrays, in bytes
# An explicit table: `np.dtype` of a received name would parse type descriptions.
_TYPES: dict[str, np.dtype] = {
    dtype.name: dtype
    for dtype in map(
        np.dtype,
        [
            *(np.bool_, np.int8, np.int16, np.int32, np.int64),
            *(np.uint8, np.uint16, np.uint32, np.uint64, np.float16, np.float32, np.float64),
            *(ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint4),
            *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
        ],
    )
}


class FrameError(ValueError):
    """Bytes are not a valid message."""


@dataclass(frozen=True)
class ResultRef:
    """A reference to a result that stays on the rank that computed it.

    Attributes:
        call: the call's number.
        name: the result's name.
    """

    call: int
    name: str


def serialize(message: Any) -> bytes:
    """Serializes a message of dictionaries, lists, strings, numbers, `ResultRef` and arrays."""
    arrays: list[np.ndarray] = []
    text = json.dumps(_coded(message, arrays)).encode()
    parts, at = [text], 0
    for array in arrays:
        parts += [array.tobytes(), bytes(_padding(array.nbytes))]
        at += array.nbytes + _padding(array.nbytes)
    return b"".join([len(text).to_bytes(4, "little"), at.to_bytes(8, "little"), *parts])


def parse_header(head: bytes) -> tuple[int, int]:
    """Parses a header: the bytes of JSON and of arrays. Raises `FrameError`."""
    text, data = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:], "little")
    if text > _TEXT or data > _DATA:
        raise FrameError(f"a message of {text + data} bytes")
    return text, data


def deserialize(text: bytes, data: memoryview) -> Any:
    """Parses a message, whose arrays are views of `data`. Raises `FrameError`."""
    try:
        return _decoded(json.loads(text), _ArrayReader(data))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())[:_LONGEST]
        raise FrameError(f"a message that cannot be read: {reason}") from None


def _padding(size: int) -> int:
    return -size % _ALIGNED


def _coded(tree: Any, arrays: list[np.ndarray]) -> Any:
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case ResultRef():
            return {"ref": [tree.call, tree.name]}
        case dict():
            return {"dict": [[key, _coded(value, arrays)] for key, value in tree.items()]}
        case np.ndarray() | np.generic() | Array():
            array = np.ascontiguousarray(tree)
            if array.dtype.name not in _TYPES:
                raise TypeError(f"an array of {array.dtype.name} cannot be sent")
            arrays.append(array)
            return {"array": [array.dtype.name, *np.shape(tree)]}
        case _ if isinstance(tree, Sequence):
            return [_coded(value, arrays) for value in tree]
    raise TypeError(f"a {type(tree).__name__} cannot be sent")


class _ArrayReader:
    """Reads arrays from a buffer, one after the other."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def take(self, name: Any, shape: Sequence[Any]) -> np.ndarray:
        """The next array, of a dtype and shape."""
        dtype = _TYPES.get(name) if isinstance(name, str) else None
        if dtype is None or any(type(n) is not int or n < 0 for n in shape):
            raise FrameError(f"an array of {name!r} and {shape}")
        size = math.prod(shape) * dtype.itemsize
        if self.at + size > len(self.data):
            raise FrameError("arrays that are cut short")
        array = np.frombuffer(self.data[self.at : self.at + size], dtype).reshape(shape)
        self.at += size + _padding(size)
        return array


def _decoded(coded: Any, reading: _ArrayReader) -> Any:
    if isinstance(coded, list):
        return [_decoded(value, reading) for value in coded]
    if not isinstance(coded, dict):
        return coded
    if len(coded) != 1:
        raise FrameError("neither an array nor a dictionary")
    ((kind, parts),) = coded.items()
    match kind, parts:
        case "ref", [int(call), str(name)]:
            return ResultRef(call, name)
        case "dict", list():
            return dict(_pair(each, reading) for each in parts)
        case "array", [name, *shape]:
            return reading.take(name, shape)
    raise FrameError(f"a part {kind!r} that cannot be read")


def _pair(coded: Any, reading: _ArrayReader) -> tuple[str | int, Any]:
    match coded:
        case [str() | int() as key, value]:
            return key, _decoded(value, reading)
    raise FrameError("a dictionary's part that is no key with a value")

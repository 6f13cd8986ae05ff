"""GGUF, llama.cpp's file: metadata and tensors, memory-mapped, versions 2 and 3, either byte order.

The layout is that of the GGUF document of the ggml project: magic, version, counts, key-value
pairs, tensor descriptions, then the tensors' data from the next multiple of the alignment on.
Nothing the file says is believed before it is checked against the bytes that are there, and no
more than about nine times the header's size is taken to hold it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from jinfer.loader.checkpoint import ggml_types
from jinfer.loader.checkpoint.checkpoint_reader import Checkpoint, CheckpointError, Tensor
from jinfer.loader.checkpoint.mapped_file import MappedFile, as_array

_STRINGS = 1024  # strings read singly before short strings are tried again
_WINDOW = 1 << 20  # bytes that are searched for short strings
_EIGHT_ZEROS = "\0" * 8


class Cursor:
    """Reads what comes next, never past the end of the file.

    Attributes:
        path: of the file.
        at: the byte that comes next.
        order: of bytes, as `struct` names them.
    """

    def __init__(self, path: Path, file: MappedFile) -> None:
        self.path = path
        self.at = 0
        self.order = "<"
        self._data = memoryview(file.view(0, file.size))

    def error(self, reason: str, at: int | None = None) -> CheckpointError:
        return CheckpointError(self.path, reason, self.at if at is None else at)

    def need(self, nbytes: int, what: str) -> None:
        """Raise unless the file has `nbytes` more bytes."""
        left = len(self._data) - self.at
        if nbytes > left:
            raise self.error(
                f"{what}: takes {nbytes} bytes or more and the file has {left} left;"
                " it is cut off or damaged, fetch it again"
            )

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        self.at += count
        return bytes(self._data[self.at - count : self.at])

    def number(self, code: str, what: str) -> Any:
        code = self.order + code
        self.need(struct.calcsize(code), what)
        (value,) = struct.unpack_from(code, self._data, self.at)
        self.at += struct.calcsize(code)
        return value

    def numbers(self, code: str, count: int) -> np.ndarray:
        """Read `count` numbers, for which `need` was called."""
        dtype = np.dtype(self.order + code)
        values = np.frombuffer(self._data, dtype, count, self.at)
        self.at += values.nbytes
        return values

    def strings(self, count: int, what: str) -> list[str]:
        found: list[str] = []
        while (left := count - len(found)) > 0:
            some = self._short_strings(left) if left >= _STRINGS and self.order == "<" else []
            found += some or self._any_strings(min(left, _STRINGS), len(found), what)
        return found

    def _short_strings(self, count: int) -> list[str]:
        """Read the next strings as far as they are short UTF-8, in half the time.

        A string of less than 256 bytes is a byte with its length, seven zeros and its text. A text
        that is empty or contains a zero breaks this pattern, and reading stops before it.
        """
        some = self._data[self.at : self.at + min(_WINDOW, 64 * count)]
        window = np.frombuffer(some, np.uint8).copy()
        zeros = np.flatnonzero(window == 0)[: 7 * (count + 1)]
        heads = zeros[: len(zeros) // 7 * 7 : 7] - 1
        if not len(heads) or heads[0] != 0:
            return []
        ends = heads + 8 + window[heads]
        # A string ends where the next begins; the last string here has no next.
        right = (zeros[6::7][: len(heads)] == heads + 7)[:-1] & (ends[:-1] == heads[1:])
        whole = min(count, len(right) if right.all() else int(right.argmin()))
        if not whole:
            return []
        window[heads[:whole]] = 0
        try:
            text = str(window[8 : ends[whole - 1]].data, "utf-8")
        except UnicodeDecodeError:
            return []
        self.at += int(ends[whole - 1])
        return text.split(_EIGHT_ZEROS)

    def _any_strings(self, count: int, before: int, what: str) -> list[str]:
        # Many of these: everything in local variables.
        data, at, size = self._data, self.at, len(self._data)
        length = struct.Struct(f"{self.order}Q").unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length(data, at)[0]
                if at > size:
                    raise struct.error
                found.append(str(data[start:at], "utf-8", "surrogateescape"))
        except struct.error:
            raise self.error(
                f"{what}: string {before + len(found)} ends after the file;"
                " it is cut off or damaged, fetch it again"
            ) from None
        self.at = at
        return found

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]


_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4  # ggml's limit
_MAX_PAIRS = 1 << 16  # known files have fewer than 1000
_MAX_DEPTH = 8  # arrays of arrays; known files have a single level
_ALIGNMENTS = [1 << power for power in range(3, 25)]  # a multiple of 8, says the document
_DEFAULT_ALIGNMENT = 32

# Metadata value types -> struct codes.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LEAST_BYTES = {_BOOL: 1, _STRING: 8, _ARRAY: 12} | {
    kind: struct.calcsize(f"<{code}") for kind, code in _NUMBERS.items()
}
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_LEAST_PAIR = 8 + 4 + 1  # an empty key, a type, a byte
_LEAST_TENSOR = 8 + 4 + 4 + 8  # an empty name, no dimensions, a type, an offset

_REMOVED_TYPES = (4, 5, 31, 32, 33, 36, 37, 38)  # Q4_2, Q4_3, and the interleaved Q4_0, IQ4_NL


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file, or all files of a split model if `path` is any of them.

    `metadata` has plain Python values: int, float, bool, str, and lists of them. Text that is not
    UTF-8 (token strings of old files) is kept by "surrogateescape": encoding it with the same
    error handler gives the file's bytes back. A split model has its first file's metadata.

    A tensor's `read` decodes block formats to float32 and leaves plain types as they are. Its `raw`
    has multi-byte fields in little-endian order, in files of either order.

    Raises:
        CheckpointError: the file, or another file of the split, cannot be used.
    """
    file = _read_file(path)
    tensors = file.tensors
    metadata = file.metadata
    if (count := _split_number(file, "split.count", 1)) > 1:
        files = _read_split(file, count)
        metadata = files[0].metadata
        tensors = _merge(files)
    return Checkpoint(path, "gguf", tensors, metadata)


@dataclass(frozen=True)
class _File:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def _split_number(file: _File, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise CheckpointError(file.path, f"{key} is {_show(value)}, not a count")
    return value


def _read_split(opened: _File, count: int) -> list[_File]:
    """Read all files of the split that `opened` belongs to, in order."""
    name = _PART.fullmatch(opened.path.name)
    if name is None or int(name[3]) != count:
        raise CheckpointError(
            opened.path,
            f"holds one of {count} parts of a model, but is not called"
            f" <model>-<number>-of-{count:05d}.gguf; give it its own name back",
        )
    files = []
    for number in range(count):
        path = opened.path.with_name(f"{name[1]}-{number + 1:05d}-of-{name[3]}.gguf")
        if not path.exists():
            raise CheckpointError(path, f"part {number + 1} of {count} is missing; put it there")
        file = opened if path == opened.path else _read_file(path)
        if _split_number(file, "split.count", 1) != count:
            raise CheckpointError(path, f"is not part of a model in {count} files")
        if (found := _split_number(file, "split.no", 0)) != number:
            raise CheckpointError(path, f"is called part {number + 1} but holds part {found + 1}")
        files.append(file)
    return files


def _merge(files: list[_File]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        if twice := tensors.keys() & file.tensors.keys():
            raise CheckpointError(file.path, f"tensor {_show(min(twice))} is in another part too")
        tensors |= file.tensors
    total = _split_number(files[0], "split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            files[0].path, f"the parts have {len(tensors)} tensors, not the {total} they should"
        )
    return tensors


def _read_file(path: Path) -> _File:
    file = MappedFile(path)
    cursor = Cursor(path, file)
    tensor_count, pair_count = _header(cursor)
    metadata = _pairs(cursor, pair_count)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment not in _ALIGNMENTS:
        raise CheckpointError(
            path, f"general.alignment is {_show(alignment)}, not a power of two from 8 to 2^24"
        )
    infos = [_info(cursor) for _ in range(tensor_count)]
    start = -cursor.at // alignment * -alignment
    _check_places(path, infos, start, alignment, file.size)
    tensors: dict[str, Tensor] = {}
    for info in infos:
        if info.name in tensors:
            raise CheckpointError(path, f"tensor {_show(info.name)} is there twice", info.at)
        own = _Stored(file, info, start + info.offset, cursor.order == ">")
        tensors[info.name] = Tensor(
            info.name, info.shape, info.block.name, info.nbytes, own.read, own.raw
        )
    return _File(path, metadata, tensors)


def raw_metadata(path: Path) -> dict[str, bytes]:
    """The type and value of each key of a file, as its bytes: to be written again.

    Of a part of a split model they are the first part's, which has the model's.

    Raises:
        CheckpointError: the file cannot be read, or has its numbers in big-endian order.
    """
    cursor = Cursor(path, MappedFile(path))
    _, count = _header(cursor)
    if cursor.order != "<":
        raise cursor.error("has big-endian numbers; convert it to little-endian", 4)
    found = {}
    for number in range(count):
        key, begin = cursor.string(f"key {number}"), cursor.at
        what = f"value of {_show(key)}"
        _value(cursor, cursor.number("I", what), what)
        end, cursor.at = cursor.at, begin
        found[key] = cursor.take(end - begin, what)
    first = _PART.sub(r"\g<1>-00001-of-\g<3>.gguf", path.name)
    if "split.count" in found and first != path.name:
        return raw_metadata(path.with_name(first))
    return found


def _show(value: object) -> str:
    """Format a value for an error message: short and printable."""
    text = ascii(value[:64] if isinstance(value, str | list) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _header(cursor: Cursor) -> tuple[int, int]:
    """Check magic and version, finds the byte order; returns tensor and key-value counts."""
    magic = cursor.take(4, "magic")
    if magic != _MAGIC:
        raise cursor.error(f"starts with {magic!r}: no GGUF file", 0)
    version = cursor.number("I", "version")
    if version & 0xFFFF == 0:  # the number's other end: no version reaches 65536
        cursor.order = ">"
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version == 1:
        raise cursor.error("GGUF version 1 is not supported; convert the model again", 4)
    if version not in _VERSIONS:
        raise cursor.error(f"GGUF version {version} is not known; 2 and 3 are", 4)
    tensor_count = cursor.number("Q", "tensor count")
    pair_count = cursor.number("Q", "key-value count")
    if pair_count > _MAX_PAIRS:
        raise cursor.error(f"has {pair_count} key-value pairs; at most {_MAX_PAIRS} are read")
    least = tensor_count * _LEAST_TENSOR + pair_count * _LEAST_PAIR
    cursor.need(least, f"{tensor_count} tensors and {pair_count} key-value pairs")
    return tensor_count, pair_count


def _pairs(cursor: Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for number in range(count):
        at = cursor.at
        key = cursor.string(f"key {number}")
        if key in metadata:
            raise cursor.error(f"key {_show(key)} is there twice", at)
        what = f"value of {_show(key)}"
        metadata[key] = _value(cursor, cursor.number("I", what), what)
    return metadata


def _value(cursor: Cursor, kind: int, what: str) -> Any:
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _array(cursor, what, 1)
    if kind == _BOOL:
        cursor.need(1, what)
        return _bools(cursor, 1, what)[0]
    if kind in _NUMBERS:
        return cursor.number(_NUMBERS[kind], what)
    raise cursor.error(f"{what}: type {kind} is not known; 0 to 12 are")


def _array(cursor: Cursor, what: str, depth: int) -> list[Any]:
    kind = cursor.number("I", what)
    count = cursor.number("Q", what)
    if kind not in _LEAST_BYTES:
        raise cursor.error(f"{what}: array type {kind} is not known; 0 to 12 are")
    cursor.need(count * _LEAST_BYTES[kind], f"{what}, array of {count}")
    if kind == _STRING:
        return cursor.strings(count, what)
    if kind == _BOOL:
        return _bools(cursor, count, what)
    if kind in _NUMBERS:
        values: list[Any] = cursor.numbers(_NUMBERS[kind], count).tolist()
        return values
    if depth == _MAX_DEPTH:
        raise cursor.error(f"{what}: arrays are nested more than {_MAX_DEPTH} deep")
    return [_array(cursor, what, depth + 1) for _ in range(count)]


def _bools(cursor: Cursor, count: int, what: str) -> list[bool]:
    at = cursor.at
    values = cursor.numbers("B", count)
    if values.size and values.max() > 1:
        raise cursor.error(f"{what}: a bool is {values.max()}, neither 0 nor 1", at)
    truths: list[bool] = values.astype(bool).tolist()
    return truths


@dataclass(frozen=True)
class _Info:
    """A tensor's description: `offset` counts from the start of the data, `at` is its own place."""

    name: str
    shape: tuple[int, ...]
    block: ggml_types.Block
    nbytes: int
    offset: int
    at: int


def _info(cursor: Cursor) -> _Info:
    at = cursor.at
    name = cursor.string("tensor name")
    what = f"tensor {_show(name)}"
    dims = cursor.number("I", what)
    if dims > _MAX_DIMS:
        raise cursor.error(f"{what} has {dims} dimensions; at most {_MAX_DIMS} are allowed", at)
    cursor.need(8 * dims, what)
    shape = tuple(cursor.numbers("Q", dims).tolist()[::-1])
    if 0 in shape:
        raise cursor.error(f"{what} has shape {shape}: a dimension is 0", at)
    block = _block(cursor, what)
    if (row := shape[-1] if shape else 1) % block.values:
        raise cursor.error(
            f"{what}: rows of {row} are not whole {block.name} blocks of {block.values}", at
        )
    nbytes = math.prod(shape) // block.values * block.bytes
    return _Info(name, shape, block, nbytes, cursor.number("Q", what), at)


def _block(cursor: Cursor, what: str) -> ggml_types.Block:
    at = cursor.at
    kind = cursor.number("I", what)
    block = ggml_types.block_of(kind)
    if kind in _REMOVED_TYPES:
        raise cursor.error(f"{what}: ggml has removed type {kind}; convert the model again", at)
    if block is None:
        raise cursor.error(f"{what}: type {kind} is not known; a newer gguf package may do", at)
    return block


def _check_places(path: Path, infos: list[_Info], start: int, alignment: int, size: int) -> None:
    """Every tensor is aligned, inside the file, and apart from the others."""
    for info in infos:
        if info.offset % alignment:
            reason = f"offset {info.offset} is no multiple of the alignment, {alignment}"
        elif start + info.offset + info.nbytes > size:
            reason = (
                f"bytes {start + info.offset} to {start + info.offset + info.nbytes} are not in"
                f" the file of {size}; it is cut off or damaged, fetch it again"
            )
        else:
            continue
        raise CheckpointError(path, f"tensor {_show(info.name)}: {reason}", info.at)
    for first, other in pairwise(sorted(infos, key=lambda info: info.offset)):
        if first.offset + first.nbytes > other.offset:
            names = f"tensors {_show(first.name)} and {_show(other.name)}"
            raise CheckpointError(path, f"{names} overlap", other.at)


@dataclass(frozen=True)
class _Stored:
    """A tensor's bytes: where they are, and in which order."""

    file: MappedFile
    info: _Info
    at: int
    big_endian: bool

    def raw(self) -> np.ndarray:
        raw = self.file.view(self.at, self.info.nbytes)
        return self._made(ggml_types.swap_bytes, raw) if self.big_endian else raw

    def read(self) -> np.ndarray:
        info, raw = self.info, self.raw()
        if dtype := ggml_types.PLAIN.get(info.block.name):
            return as_array(raw, dtype, info.shape)
        return self._made(ggml_types.decode, raw, info.shape)

    def _made(self, function: Callable[..., np.ndarray], *of: Any) -> np.ndarray:
        try:
            return function(self.info.block.name, *of)
        except ValueError as error:
            reason = f"tensor {_show(self.info.name)}: {error}"
            raise CheckpointError(self.file.path, reason, self.at) from error

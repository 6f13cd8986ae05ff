"""Safetensors: an 8-byte little-endian length, a JSON header, then tensors.

Source: "Format" in the README of huggingface/safetensors. The header names each tensor's dtype,
shape and `data_offsets` [begin, end) counted from the end of the header; together the tensors
cover the rest of the file exactly, without holes or overlaps.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import (
    DTYPES,
    SUB_BYTE,
    Checkpoint,
    CheckpointError,
    Tensor,
    is_bool,
)
from jinfer.loader.checkpoint.mapped_file import (
    MAX_JSON_BYTES,
    MappedFile,
    as_array,
    element_count,
    parse_object,
)
from jinfer.loader.checkpoint.native_checkpoint import ALIGNMENT, PADDING, marks

# Not the package's reader (0.8): it fails on FP8, copies each tensor, and its errors name neither
# the file nor the tensor.
_MAX_TENSORS = 1 << 17  # the largest known models have as many in all their shards together
_PREFIX = 8
_FIELDS = {"dtype", "shape", "data_offsets"}


def open_safetensors(path: Path) -> Checkpoint:
    """Open one .safetensors file.

    Raises:
        CheckpointError: a header that is malformed or disagrees with the file.
    """
    file = MappedFile(path)
    header, data_start = _read_header(file)
    metadata = _read_metadata(file, header.pop("__metadata__", {}))
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, Tensor] = {}
    if len(header) > _MAX_TENSORS:
        reason = f"has {len(header)} tensors; at most {_MAX_TENSORS} are read from a file"
        raise CheckpointError(file.path, reason, _PREFIX)
    for name, entry in header.items():
        tensor, begin = _read_entry(file, name, entry, data_start)
        tensors[name] = tensor
        spans.append((begin, begin + tensor.nbytes, name))
    _check_cover(file, spans, data_start)
    return Checkpoint(path, "safetensors", tensors, metadata)


def _read_header(file: MappedFile) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(0, _PREFIX), "little")
    if length > MAX_JSON_BYTES:
        reason = f"header of {length} bytes is above the format's bound of {MAX_JSON_BYTES}"
        raise CheckpointError(file.path, reason, 0)
    text = file.read(_PREFIX, length)
    if not text.startswith(b"{"):
        raise CheckpointError(file.path, "header does not start with '{'", _PREFIX)
    return parse_object(file.path, text, _PREFIX), _PREFIX + length


def _read_metadata(file: MappedFile, value: Any) -> dict[str, str]:
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return value
    raise CheckpointError(file.path, "__metadata__ is not a map of strings to strings", _PREFIX)


def _read_entry(file: MappedFile, name: str, entry: Any, data_start: int) -> tuple[Tensor, int]:
    """The tensor and its first byte, counted from `data_start`."""

    def fail(reason: str) -> CheckpointError:
        return CheckpointError(file.path, f"tensor {name[:200]!r}: {reason}", _PREFIX)

    if not isinstance(entry, dict) or set(entry) != _FIELDS:
        raise fail("needs exactly dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str):
        raise fail("bad dtype")
    bits = SUB_BYTE.get(kind) or (8 * DTYPES[kind].itemsize if kind in DTYPES else None)
    if bits is None:
        raise fail(f"unknown dtype {kind[:40]!r}")
    if not _are_sizes(shape):
        raise fail("shape is not a list of non-negative integers")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fail("data_offsets is not [begin, end] with begin <= end")
    count = element_count(shape, -(-bits // 8))
    if count is None:
        raise fail("shape is too large or has too many dimensions")
    begin, end = offsets
    nbytes = -(-count * bits // 8)
    if nbytes != end - begin:
        raise fail(f"{kind} {shape} takes {nbytes} bytes, data_offsets give {end - begin}")
    start = data_start + begin
    if start + nbytes > file.size:
        raise fail(f"ends at byte {start + nbytes} of a file of {file.size}: it is cut short")
    raw = functools.partial(file.view, start, nbytes)
    if kind in SUB_BYTE:
        reason = f"dtype {kind} packs several values a byte, which is not supported"

        def refuse() -> NoReturn:
            raise fail(reason)

        return Tensor(name, tuple(shape), kind, nbytes, refuse, raw, reason), begin
    read = functools.partial(_read_values, file, name, start, nbytes, kind, tuple(shape))
    return Tensor(name, tuple(shape), kind, nbytes, read, raw), begin


def _are_sizes(values: Any) -> bool:
    # bool is an int to isinstance
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _check_cover(file: MappedFile, spans: list[tuple[int, int, str]], data_start: int) -> None:
    """Check that the tensors fill the file from `data_start` on, without gaps or overlaps."""
    expected = 0
    for begin, end, name in sorted(spans):
        if begin != expected:
            problem = "overlaps the tensor before it" if begin < expected else "follows a hole"
            reason = f"tensor {name[:200]!r} {problem}: begins at {begin}, expected {expected}"
            raise CheckpointError(file.path, reason, data_start + begin)
        expected = end
    if data_start + expected != file.size:
        reason = f"{file.size - data_start - expected} bytes after the last tensor"
        raise CheckpointError(file.path, reason, data_start + expected)


def _read_values(
    file: MappedFile, name: str, start: int, nbytes: int, kind: str, shape: tuple[int, ...]
) -> np.ndarray:
    raw = file.view(start, nbytes)
    if kind == "BOOL" and not is_bool(raw):
        reason = f"tensor {name[:200]!r}: BOOL has a byte that is neither 0 nor 1"
        raise CheckpointError(file.path, reason, start)
    return as_array(raw, DTYPES[kind], shape)


SHARD_BYTES = 4 << 30
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Writer:
    """Writes named arrays to `model.safetensors`, or to several files with an index."""

    def __init__(
        self, folder: Path, shard_bytes: int = SHARD_BYTES, *, native: bool = True
    ) -> None:
        """Memory holds at most `shard_bytes`, and the arrays that were added last.

        Args:
            native: write the files of a native checkpoint, whose arrays are aligned.
        """
        self._folder, self._shard_bytes, self._native = folder, shard_bytes, native
        self._held: dict[str, np.ndarray] = {}
        self._shards: list[list[str]] = []
        self.nbytes = 0

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Add arrays that must be in the same file."""
        size = sum(array.nbytes for array in arrays.values())
        held = sum(array.nbytes for array in self._held.values())
        if self._held and size + held > self._shard_bytes:
            self._flush(marks() if self._native else {"format": "pt"})
        self._held |= arrays
        self.nbytes += size

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the remaining arrays, and `metadata`."""
        self._flush(metadata)
        count = len(self._shards)
        if count == 1:
            self._shard(0).rename(self._folder / "model.safetensors")
            return
        names = dict[str, str]()
        for i, shard in enumerate(self._shards):
            name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            self._shard(i).rename(self._folder / name)
            names |= dict.fromkeys(shard, name)
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": names}
        path = self._folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")

    def _shard(self, number: int) -> Path:
        return self._folder / f"shard-{number}"

    def _flush(self, metadata: Mapping[str, str]) -> None:
        path = self._shard(len(self._shards))
        if self._native:
            write_aligned(path, self._held, metadata)
        else:
            from safetensors.numpy import save_file  # here, because readers do without

            arrays = {name: np.ascontiguousarray(array) for name, array in self._held.items()}
            save_file(arrays, path, dict(metadata))
        self._shards.append(list(self._held))
        self._held = {}


def write_aligned(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write a file in which every array begins at a multiple of `ALIGNMENT`.

    XLA takes over arrays of a memory map only if they are aligned, and the package safetensors
    aligns to 8 bytes. The format allows no gaps, so the padding is tensors as well.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    gaps = {}
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        dtype = NAMES[array.dtype]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [begin, end]}
        if gap := -end % ALIGNMENT:
            gaps[name] = gap
            begin, end = end, end + gap
            padding = {"dtype": "U8", "shape": [gap], "data_offsets": [begin, end]}
            header[name + PADDING] = padding
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, array in arrays.items():
            np.ascontiguousarray(array).tofile(file)
            file.write(bytes(gaps.get(name, 0)))

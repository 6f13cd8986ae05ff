"""GGUF writer: a file's metadata with other tensors."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import gguf
import numpy as np
from gguf.quants import QuantError, quantize

from jinfer.loader.checkpoint import CheckpointError
from jinfer.loader.checkpoint.ggml_types import BLOCKS

_VERSION = 3
_UINT32 = 4  # type of a metadata value
_ALIGNMENT = 32


class StoredTensor(NamedTuple):
    """A tensor of the file.

    Attributes:
        shape: outermost dimension first.
        type: ggml's name of it.
    """

    shape: tuple[int, ...]
    type: str

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        block = BLOCKS[self.type]
        return math.prod(self.shape) // block.values * block.bytes


class GGUFWriter:
    """Write tensors, in any order, to a file that has room for all of them; open in its `with`."""

    def __init__(
        self, path: Path, metadata: Mapping[str, bytes], tensors: Mapping[str, StoredTensor]
    ) -> None:
        """Lay the file out.

        Args:
            metadata: key -> type and value, as bytes of the file.
            tensors: every tensor's name.
        """
        self._offsets: dict[str, int] = {}
        infos, end = [], 0
        for name, tensor in tensors.items():
            self._offsets[name] = end
            shape = tensor.shape[::-1]
            type_id = BLOCKS[tensor.type].type_id
            fields = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, end)
            infos.append(_text(name) + fields)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        pairs = b"".join(_text(key) + value for key, value in metadata.items())
        counts = struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))
        header = b"GGUF" + counts + pairs + b"".join(infos)
        header += bytes(-len(header) % _ALIGNMENT)
        self._path, self._header, self._end = path, header, len(header) + end

    def __enter__(self) -> Self:
        """Write the header."""
        with ExitStack() as stack:
            self._file: BinaryIO = stack.enter_context(self._path.open("wb"))
            self._file.write(self._header)
            self._file.truncate(self._end)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def write(self, name: str, raw: np.ndarray) -> None:
        """Write a tensor's bytes."""
        self._file.seek(len(self._header) + self._offsets[name])
        np.ascontiguousarray(raw).tofile(self._file)


def uint32(value: int) -> bytes:
    """A metadata value."""
    return struct.pack("<II", _UINT32, value)


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, type_name: str) -> None:
    """Add a tensor: a matrix in the type, a vector in float32."""
    if values.ndim == 1:
        writer.add_tensor(name, values)
        return
    kind = gguf.GGMLQuantizationType[type_name]
    writer.add_tensor(name, packed_rows(name, values, type_name), raw_dtype=kind)


def packed_rows(name: str, values: np.ndarray, type_name: str) -> np.ndarray:
    """Quantize a matrix; raises `CheckpointError` if its rows are no whole blocks."""
    try:
        return quantize(values, gguf.GGMLQuantizationType[type_name])
    except QuantError:
        reason = f"rows of {values.shape[-1]} are no whole blocks of {type_name}"
        raise CheckpointError(name, reason) from None


def copy_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """Copy another file's metadata, except what the writer sets itself."""
    for key, value in metadata.items():
        if key not in ("general.architecture", "general.file_type") and key[:5] != "GGUF.":
            _add(writer, key, value)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a metadata value, in the type it was read as."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_int32(key, value) if value < 0 else writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else list(value))


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file, which is renamed to its final name when complete."""
    out = Path(writer.path or "")
    part = out.with_name(f".{out.name}.part")
    try:
        writer.write_header_to_file(part)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)

"""GGUF writer: a file's metadata with other tensors."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import numpy as np

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
    """Writes tensors, in any order, to a file that has room for all of them; open in its `with`."""

    def __init__(
        self, path: Path, metadata: Mapping[str, bytes], tensors: Mapping[str, StoredTensor]
    ) -> None:
        """Lays the file out.

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
        """Writes the header."""
        with ExitStack() as stack:
            self._file: BinaryIO = stack.enter_context(self._path.open("wb"))
            self._file.write(self._header)
            self._file.truncate(self._end)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def write(self, name: str, raw: np.ndarray) -> None:
        """Writes a tensor's bytes."""
        self._file.seek(len(self._header) + self._offsets[name])
        np.ascontiguousarray(raw).tofile(self._file)


def uint32(value: int) -> bytes:
    """A metadata value."""
    return struct.pack("<II", _UINT32, value)


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw

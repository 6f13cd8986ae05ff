"""Safetensors writer: the arrays of a native checkpoint, in one file or several."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import DTYPES
from jinfer.loader.checkpoint.native_checkpoint import ALIGNMENT, PADDING, marks

SHARD_BYTES = 4 << 30
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Writer:
    """Writes named arrays to `model.safetensors`, or to several files with an index."""

    def __init__(
        self, folder: Path, shard_bytes: int = SHARD_BYTES, *, aligned: bool = True
    ) -> None:
        """No more than `shard_bytes` are held in memory, and the arrays last added.

        Args:
            aligned: whether files are those of a native checkpoint; others know no padding.
        """
        self._folder, self._most, self._aligned = folder, shard_bytes, aligned
        self._held: dict[str, np.ndarray] = {}
        self._shards: list[list[str]] = []
        self.nbytes = 0

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Adds arrays that stay together in a file."""
        size = sum(array.nbytes for array in arrays.values())
        held = sum(array.nbytes for array in self._held.values())
        if self._held and size + held > self._most:
            self._flush(marks() if self._aligned else {"format": "pt"})
        self._held |= arrays
        self.nbytes += size

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Writes what is left, and `metadata`."""
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
        path, aligned = self._shard(len(self._shards)), self._aligned
        write_safetensors(path, self._held, metadata, aligned=aligned)
        self._shards.append(list(self._held))
        self._held = {}


def write_safetensors(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
    *,
    aligned: bool = True,
) -> None:
    """Writes a file.

    Args:
        aligned: whether every array begins at a multiple of `ALIGNMENT`. The format has no holes,
            so what fills the gaps are tensors as well.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    gaps = {}
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        kind = NAMES[array.dtype]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [begin, end]}
        if aligned and (gap := -end % ALIGNMENT):
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

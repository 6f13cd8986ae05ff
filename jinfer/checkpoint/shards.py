"""Shards: several files of one model, merged, and checked against their index if there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinfer.checkpoint.checkpoint_reader import Checkpoint, CheckpointError, Tensor
from jinfer.checkpoint.mapped_file import MappedFile
from jinfer.checkpoint.strict_json import MAX_JSON_BYTES, parse_object
from jinfer.sandbox.safe_files import dangling_link

_MAX_NAME = 255  # bytes, as file systems have it


def open_index(index: Path, reader: Callable[[Path], Checkpoint]) -> Checkpoint:
    """Opens the shards that an index names (Hugging Face's `*.index.json`) as one checkpoint.

    The index decides: of a tensor that is in two shards, the one of the shard that it names; what a
    shard holds beyond it is left out.

    Raises:
        CheckpointError: a bad index, a path outside the folder, a missing shard, a tensor that
            its shard lacks.
    """
    weight_map = _read_weight_map(index)
    folder = index.parent
    files = sorted(set(weight_map.values()))
    for name in files:
        if not (folder / name).is_file():
            told = dangling_link(folder / name) or "is not in the folder"
            raise CheckpointError(index, f"names the shard {name!r}, which {told}")
    shards = {name: reader(folder / name) for name in files}
    for tensor, name in weight_map.items():
        if tensor not in shards[name].tensors:
            reason = f"says that {name!r} holds {tensor[:200]!r}, which it does not"
            raise CheckpointError(index, reason)
    kept = {
        name: {key: each for key, each in shard.tensors.items() if weight_map.get(key) == name}
        for name, shard in shards.items()
    }
    return _merge(folder, [replace(shard, tensors=kept[name]) for name, shard in shards.items()])


def open_shards(
    folder: Path, files: Sequence[Path], reader: Callable[[Path], Checkpoint]
) -> Checkpoint:
    """Opens one file, or all files of a set without an index, as one checkpoint.

    Raises:
        CheckpointError: a file that cannot be opened, a tensor in two shards.
    """
    return _merge(folder, [reader(file) for file in files])


def _read_weight_map(index: Path) -> dict[str, str]:
    file = MappedFile(index)
    if file.size > MAX_JSON_BYTES:
        raise CheckpointError(index, f"is an index of {file.size} bytes, above {MAX_JSON_BYTES}")
    weight_map = parse_object(index, file.read(0, file.size)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(index, "has no weight_map from tensor names to files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain(name):
            reason = f"weight_map of {tensor[:200]!r} is not a plain file name in the same folder"
            raise CheckpointError(index, reason)
    return weight_map


def _is_plain(name: str) -> bool:
    """A name that stays in its folder; links are followed: download caches are made of them."""
    return (
        name not in ("", ".", "..")
        and not set(name) & set("/\\\0:")
        and name.isprintable()
        and len(name.encode()) <= _MAX_NAME
    )


def _merge(path: Path, shards: Sequence[Checkpoint]) -> Checkpoint:
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, Any] = {}
    owner: dict[str, Path] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            if name in owner:
                reason = f"tensor {name[:200]!r} is also in {owner[name].name}"
                raise CheckpointError(shard.path, reason)
            owner[name] = shard.path
            tensors[name] = tensor
        for key, value in shard.metadata.items():
            metadata.setdefault(key, value)
    return Checkpoint(path, shards[0].format, tensors, metadata)

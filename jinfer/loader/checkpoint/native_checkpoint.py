"""Native checkpoints: a model's parameters in their memory layout, in safetensors files.

A tensor is a parameter, "decoder.3.attn_norm.weight", or an array of a quantized parameter,
"decoder.3.attn.q.weight.words". Each begins at a multiple of 64 bytes, so that a view of the
memory map can be used without a copy; tensors called "....padding" fill the gaps. `__metadata__`
has "format" = "jinfer", "version" and, as JSON,

    "parameters"  name of each quantized parameter -> the fields of `PackedFormat`
    "same"        name of a parameter -> name of another parameter with the same array
    "settings"    the `[quantization]` that the parameters were made with
    "source"      the format, metadata and tensors (name -> [type, shape]) of the checkpoint that
                  was converted: from these its specification is resolved again

`jinfer.loader.checkpoint.orbax` reads the same arrays and metadata from Orbax's folders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NoReturn, cast, get_args

import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import Checkpoint, CheckpointError, Format, Tensor

FORMAT, VERSION = "jinfer", 1
ALIGNMENT = 64
PADDING = ".padding"
AGAIN = "convert the source again with jinfer quantize"


@dataclass(frozen=True)
class PackedFormat:
    """How a quantized parameter was packed; see `jinfer.quant.QuantizedTensor`.

    Attributes:
        shape: shape of the values, [*stack, outputs, inputs].
        columns: columns of a superblock.
        format: the fields of its `QuantFormat`.
        outliers: number of outliers in each matrix; None: it is not an `OutlierTensor`.
        reordered: whether inputs are sorted, and their order is stored.
    """

    shape: tuple[int, ...]
    columns: int
    format: Mapping[str, Any]
    outliers: int | None = None
    reordered: bool = False


@dataclass(frozen=True)
class NativeCheckpoint(Checkpoint):
    """A native checkpoint with the names and metadata of its source.

    `format`, `metadata` and `tensors` are the source's, but no tensor can be read.

    Attributes:
        parts: the stored arrays, by their names in the files.
        packed: the quantized parameters.
        same: parameter -> another parameter with the same array.
        settings: the `[quantization]` that they were quantized with.
    """

    parts: Mapping[str, Tensor]
    packed: Mapping[str, PackedFormat]
    same: Mapping[str, str]
    settings: Mapping[str, Any]


def as_native(checkpoint: Checkpoint) -> Checkpoint:
    """Return a `NativeCheckpoint` if the metadata of safetensors files say so.

    Raises:
        CheckpointError: a native checkpoint that is damaged, incomplete, or too new.
    """
    metadata = checkpoint.metadata
    if isinstance(checkpoint, NativeCheckpoint):  # its metadata are the source's
        return checkpoint
    if checkpoint.format != "safetensors" or metadata.get("format") != FORMAT:
        return checkpoint
    path = checkpoint.path
    check_version(path, metadata)
    if "source" not in metadata:
        raise CheckpointError(path, "is one file of a converted checkpoint; give the folder")
    parts = {n: part for n, part in checkpoint.tensors.items() if not n.endswith(PADDING)}
    return parse_native(path, metadata, parts)


def check_version(path: Path, metadata: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if a native checkpoint has another version."""
    version = metadata.get("version", "")
    if version != str(VERSION):
        newer = version.isdecimal() and int(version) > VERSION
        what = "update jinfer, or " if newer else ""
        reason = f"is a converted checkpoint of version {version[:20]!r}, and {VERSION} is known"
        raise CheckpointError(path, f"{reason}; {what}{AGAIN}")


def parse_native(
    path: Path, written: Mapping[str, Any], parts: Mapping[str, Tensor]
) -> NativeCheckpoint:
    """Parse the `__metadata__` of a native checkpoint.

    Args:
        path: the file that has it, for errors.
        parts: the stored arrays.

    Raises:
        CheckpointError: the metadata are damaged.
    """
    source = _table(path, written, "source")
    format = source.get("format")
    metadata, tensors = source.get("metadata"), source.get("tensors")
    if format not in get_args(Format) or not isinstance(metadata, dict):
        raise _damaged(path, "source", "names no format that is known, or has no metadata")
    if not isinstance(tensors, dict):
        raise _damaged(path, "source", "has no tensors")
    same = _table(path, written, "same")
    if not all(isinstance(other, str) for other in same.values()):
        raise _damaged(path, "same", "is not a table of names")
    return NativeCheckpoint(
        path,
        cast("Format", format),
        {name: _unreadable(path, name, entry) for name, entry in tensors.items()},
        metadata,
        parts,
        {n: _packed(path, n, w) for n, w in _table(path, written, "parameters").items()},
        same,
        _table(path, written, "settings"),
    )


def _table(path: Path, written: Mapping[str, Any], key: str) -> dict[str, Any]:
    try:
        # Not the strict reader, because metadata of GGUF may have NaN.
        table = json.loads(written.get(key, ""))
    except (ValueError, RecursionError):
        raise _damaged(path, key, "is not JSON") from None
    if not isinstance(table, dict):
        raise _damaged(path, key, "is not a table")
    return table


def _packed(path: Path, name: str, written: Any) -> PackedFormat:
    table = written if isinstance(written, dict) else {}
    shape: Any = table.get("shape")
    columns: Any = table.get("columns")
    format = table.get("format")
    outliers, reordered = table.get("outliers"), table.get("reordered", False)
    if not (
        are_sizes(shape)
        and are_sizes([columns])
        and isinstance(format, dict)
        and (outliers is None or are_sizes([outliers], least=0))
        and isinstance(reordered, bool)
    ):
        raise _damaged(path, "parameters", f"{name[:200]!r} needs a shape, columns and a format")
    return PackedFormat(tuple(shape), columns, format, outliers, reordered)


def _unreadable(path: Path, name: str, written: Any) -> Tensor:
    """Return a tensor of the source with its type and shape; it cannot be read."""
    found = type_and_shape(written)
    if found is None:
        raise _damaged(path, "source", f"tensor {name[:200]!r} is not a type and a shape")
    reason = f"has {name} converted only; use the checkpoint it was made from"
    refuse = partial(refuse_to_read, path, reason)
    return Tensor(name, found[1], found[0], 0, refuse, refuse)


def refuse_to_read(path: Path, reason: str) -> NoReturn:
    """Raise `CheckpointError`: the `read` of a tensor whose values cannot be read alone."""
    raise CheckpointError(path, reason)


def type_and_shape(written: Any) -> tuple[str, tuple[int, ...]] | None:
    """Return the type and shape that JSON's [type, shape] states; None if it is not that."""
    match written:
        case [str(type_name), shape] if are_sizes(shape, least=0):
            return type_name, tuple(shape)
    return None


def are_sizes(values: Any, least: int = 1) -> bool:
    """Whether JSON gives a list of whole numbers that can be a shape."""
    return (
        isinstance(values, list)
        and all(type(size) is int and size >= least for size in values)
        and prod(values) < 1 << 62
    )


def _damaged(path: Path, key: str, reason: str) -> CheckpointError:
    return CheckpointError(path, f"__metadata__.{key} {reason}: it is damaged, {AGAIN}")


def native_metadata(
    checkpoint: Checkpoint,
    packed: Mapping[str, PackedFormat],
    same: Mapping[str, str],
    settings: Mapping[str, Any],
) -> dict[str, str]:
    """Return the `__metadata__` of a converted checkpoint."""
    tensors = {name: [tensor.type, tensor.shape] for name, tensor in checkpoint.tensors.items()}
    # Specifications read nothing of the metadata of safetensors files.
    metadata = checkpoint.metadata if checkpoint.format in ("gguf", "llama2c") else {}
    source = {"format": checkpoint.format, "metadata": metadata, "tensors": tensors}
    parameters = {name: asdict(format) for name, format in packed.items()}
    return {
        **marks(),
        "parameters": json.dumps(parameters, default=_plain),
        "same": json.dumps(same),
        "settings": json.dumps(settings),
        "source": json.dumps(source, default=_plain),
    }


def marks() -> dict[str, str]:
    """Return the metadata that every file of a native checkpoint has."""
    return {"format": FORMAT, "version": str(VERSION)}


def _plain(value: Any) -> Any:
    """Numbers and arrays of NumPy as JSON has them."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"metadata holds a {type(value).__name__}")

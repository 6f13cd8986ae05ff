"""Orbax: native checkpoints in its folders; a process reads only the shards of its devices.

`model.orbax.json` is written by jinfer. It has the `__metadata__` of a native checkpoint (see
`native_checkpoint`), the type and shape of each array, and the size and checksum (CRC-32, except
for large files) of the files of `model.orbax`, the folder that Orbax writes and reads:

    {"__metadata__": {...}, "arrays": {name: [type, shape]}, "files": {path: [bytes, crc]}}

The folder is a tree with one level, name -> array, in the formats of TensorStore (OCDBT, Zarr 3).
They are data: nothing that is read from it is executed.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import DTYPES, CheckpointError, Tensor
from jinfer.loader.checkpoint.mapped_file import (
    MAX_JSON_BYTES,
    MappedFile,
    element_count,
    parse_object,
)
from jinfer.loader.checkpoint.native_checkpoint import (
    AGAIN,
    FORMAT,
    NativeCheckpoint,
    check_version,
    parse_native,
    refuse_to_read,
    type_and_shape,
)
from jinfer.sandbox.safe_files import read_regular_file

if TYPE_CHECKING:
    import jax

DESCRIPTION, FOLDER = "model.orbax.json", "model.orbax"
# Files that every folder of Orbax has.
_MARKS = ("orbax.checkpoint", "_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt")
_LARGE = 1 << 20  # bytes of a file that holds values; what Orbax reads to find them is small
_READ_AHEAD = 64 << 20  # bytes of arrays that are read at a time, at least the largest array


@dataclass(frozen=True)
class OrbaxCheckpoint(NativeCheckpoint):
    """A native checkpoint whose arrays `restore` reads: no tensor of `parts` can be read alone.

    Attributes:
        folder: Orbax's.
    """

    folder: Path


def orbax_api(path: Path) -> Any:
    """Orbax, which is imported when it is needed only.

    Raises:
        CheckpointError: it is not installed, or too old; `path` is what it is needed for.
    """
    try:
        from orbax.checkpoint import v1
    except ImportError:
        raise CheckpointError(
            path,
            "needs the package orbax-checkpoint, version 0.12.8 or newer; run: "
            f"{sys.executable} -m pip install 'jinfer[orbax]'",
        ) from None
    return v1


def open_orbax(path: Path) -> OrbaxCheckpoint:
    """Open a native checkpoint by its description; Orbax is not needed for that.

    Args:
        path: `model.orbax.json`.

    Raises:
        CheckpointError: the description is damaged, or a file of the folder is missing or cut off.
    """
    if not path.is_file():
        reason = f"is missing; without it, {FOLDER} cannot be read: {AGAIN}"
        raise CheckpointError(path, reason)
    file = MappedFile(path)
    if file.size > MAX_JSON_BYTES:
        raise CheckpointError(
            path, f"is a description of {file.size} bytes, above {MAX_JSON_BYTES}"
        )
    described = parse_object(path, file.read(0, file.size))
    metadata = described.get("__metadata__")
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(path, f"__metadata__ is not a table of strings: {AGAIN}")
    if metadata.get("format") != FORMAT:
        raise CheckpointError(path, f"does not describe what jinfer quantize wrote: {AGAIN}")
    check_version(path, metadata)
    arrays, folder = _table(path, described, "arrays"), path.parent / FOLDER
    _check_files(path, folder, _table(path, described, "files"))
    parts = {name: _part(path, name, written) for name, written in arrays.items()}
    return OrbaxCheckpoint(**vars(parse_native(path, metadata, parts)), folder=folder)


def restore(
    checkpoint: OrbaxCheckpoint, abstract: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Read arrays to their devices; a process reads the shards of its own devices.

    Memory holds the result, and about twice `_READ_AHEAD` or the largest array.

    Args:
        abstract: name of each array -> its shape, type and `sharding` (None: the first device).
            Arrays of another type are cast.

    Raises:
        CheckpointError: Orbax is not installed, or the folder differs from its description, or
            cannot be read.
    """
    import jax  # here: a command's help needs the errors of this package, and no JAX

    api = orbax_api(checkpoint.folder)
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    placed = {
        name: jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=like.sharding or first)
        for name, like in abstract.items()
    }
    _check_stored(api, checkpoint)
    empty = {name: like for name, like in placed.items() if not like.size}
    whole = {name: like for name, like in placed.items() if like.size}
    context = api.Context()
    context.pytree.loading.partial_load = True
    # Orbax wants less than this for an array, not as much.
    sizes = (like.size * max(like.dtype.itemsize, _stored_dtype(checkpoint, name).itemsize)
             for name, like in whole.items())  # fmt: skip
    context.memory.read_concurrent_bytes = max(_READ_AHEAD, *sizes, 0) + 1
    path, read = checkpoint.folder.absolute(), dict[str, jax.Array]()
    if whole:
        with context:
            read = _call_orbax(checkpoint.folder, lambda: api.load(path, whole))
    zeros = {n: jax.device_put(np.zeros(e.shape, e.dtype), e.sharding) for n, e in empty.items()}
    return {**read, **zeros}


def restored_tensors(checkpoint: OrbaxCheckpoint, names: Collection[str]) -> dict[str, Tensor]:
    """Some of the checkpoint's tensors, with their values in the host's memory; as `restore`."""
    import jax

    try:
        host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX has no CPU backend
        host = None
    abstract = {
        name: jax.ShapeDtypeStruct(tensor.shape, DTYPES[tensor.type], sharding=host)
        for name, tensor in checkpoint.parts.items()
        if name in names
    }
    arrays = restore(checkpoint, abstract)
    return {
        name: replace(checkpoint.parts[name], read=partial(np.asarray, array))
        for name, array in arrays.items()
    }


def _check_stored(api: Any, checkpoint: OrbaxCheckpoint) -> None:
    """Raise `CheckpointError` unless the folder has the arrays that its description names."""
    folder = checkpoint.folder
    found = _call_orbax(folder, lambda: api.metadata(folder.absolute()).metadata)
    stored = {
        name: (tuple(array.shape), np.dtype(array.dtype))
        for name, array in (found.items() if isinstance(found, dict) else ())
        if hasattr(array, "shape") and hasattr(array, "dtype")
    }
    for name, part in checkpoint.parts.items():
        if not prod(part.shape):
            continue  # Orbax stores no empty arrays
        if name not in stored:
            raise CheckpointError(folder, f"has no array {name}: it is damaged, {AGAIN}")
        shape, dtype = stored[name]
        if (shape, dtype) != (part.shape, DTYPES[part.type]):
            raise CheckpointError(
                folder,
                f"{name} is {dtype} {list(shape)}, but {DESCRIPTION} says "
                f"{DTYPES[part.type]} {list(part.shape)}: it is damaged, {AGAIN}",
            )


def _call_orbax(folder: Path, question: Callable[[], Any]) -> Any:
    """Call Orbax; its errors and TensorStore's have many types and many lines."""
    from jax.errors import JaxRuntimeError

    try:
        return question()
    except (MemoryError, JaxRuntimeError):
        raise  # about the device, not about the folder
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0][:300]
        raise CheckpointError(folder, f"cannot be restored: {reason}; {AGAIN}") from error


def _stored_dtype(checkpoint: OrbaxCheckpoint, name: str) -> np.dtype:
    return DTYPES[checkpoint.parts[name].type]


def _table(path: Path, described: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = described.get(key)
    if not isinstance(table, dict):
        raise CheckpointError(path, f"{key} is not a table: it is damaged, {AGAIN}")
    return table


def describe_file(path: Path) -> list[int | None]:
    """Size and checksum of a file, [bytes, crc]. Raises `OSError`."""
    size = path.stat().st_size
    if size > _LARGE and path.is_file():
        return [size, None]
    return [size, zlib.crc32(read_regular_file(path, _LARGE))]


def _check_files(path: Path, folder: Path, files: Mapping[str, Any]) -> None:
    for name, written in files.items():
        parts = PurePosixPath(name).parts
        inside = parts and ".." not in parts and not name.startswith("/")
        if not inside or not isinstance(written, list) or len(written) != 2:
            reason = f"files: {name[:200]!r} is not a file of {FOLDER} with size and checksum"
            raise CheckpointError(path, f"{reason}: it is damaged, {AGAIN}")
    if missing := [name for name in _MARKS if name not in files]:
        raise CheckpointError(path, f"files: {missing[0]} is missing: it is damaged, {AGAIN}")
    for name, written in files.items():
        try:
            found = describe_file(folder / name)
        except (OSError, ValueError):
            raise CheckpointError(folder / name, f"is missing, or not readable; {AGAIN}") from None
        if found != written:
            reason = f"has {found[0]} bytes, but {written[0]} were written: it is cut off"
            if found[0] == written[0]:
                reason = "is not what was written: it is damaged"
            raise CheckpointError(folder / name, f"{reason[:200]}; {AGAIN}")


def _part(path: Path, name: str, written: Any) -> Tensor:
    found = type_and_shape(written)
    if found is None or found[0] not in DTYPES:
        reason = f"arrays: {name[:200]!r} is not a type and a shape"
        raise CheckpointError(path, f"{reason}: it is damaged, {AGAIN}")
    type_name, shape = found
    itemsize = DTYPES[type_name].itemsize
    count = element_count(shape, itemsize)
    if count is None:
        raise CheckpointError(path, f"arrays: {name[:200]!r} has too large a shape: {AGAIN}")
    reason = f"{name} is not read alone, but restored with the others"
    refuse = partial(refuse_to_read, path, reason)
    return Tensor(name, shape, type_name, count * itemsize, refuse, refuse)

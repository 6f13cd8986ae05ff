"""Loading: a checkpoint's tensors become the model's parameters, one at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase

import jax
import numpy as np
from jax import Array
from tqdm import tqdm

from jinfer.checkpoint import Checkpoint, CheckpointError, Tensor
from jinfer.model import AbstractModel
from jinfer.spec.errors import nearest
from jinfer.spec.tensors import Place, TensorMap


class LoadError(ValueError):
    """Checkpoint and specification do not fit each other: names the file and the tensor."""


def load(
    model: AbstractModel, checkpoint: Checkpoint, tensors: TensorMap, *, progress: bool = False
) -> tuple[Array, ...]:
    """Loads the parameters of a model, in the order of `model.names`.

    Beyond the result, memory holds one decoded tensor per thread at a time.

    Args:
        tensors: the checkpoint's names for the parameters.
        progress: show a bar.

    Raises:
        LoadError: a parameter has no tensor, a tensor has no parameter, or a shape differs.
        CheckpointError: the file is broken.
    """
    files = _by_name(checkpoint, tensors.prefixes)
    found = {name: _find(name, tensors, files, checkpoint) for name in model.names}
    _check_all_used(model, checkpoint, tensors, files, found.values())
    shapes = dict(zip(model.names, (p.shape for p in model.parameters), strict=True))
    bar = tqdm(
        total=sum(file.nbytes for file, _ in found.values()),
        desc="loading", unit="B", unit_scale=True, leave=False, disable=not progress,
    )  # fmt: skip
    lock = threading.Lock()

    def one(name: str, abstract: jax.ShapeDtypeStruct) -> Array:
        file, place = found[name]
        values = _part(file, place, name, shapes, checkpoint)
        if values.shape != abstract.shape:
            raise LoadError(
                f"{checkpoint.path}: {file.name} is {list(values.shape)} for {name}, "
                f"but the specification says {list(abstract.shape)}"
            )
        array = jax.device_put(_convert(values, abstract.dtype))
        array.block_until_ready()
        with lock:
            bar.update(file.nbytes // max(1, len(place.parts)))
        return array

    with bar, ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return tuple(pool.map(one, model.names, model.parameters))


def _convert(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=dtype)


def _by_name(checkpoint: Checkpoint, prefixes: Iterable[str]) -> dict[str, Tensor]:
    """The file's tensors by their names without an optional prefix."""
    files = dict(checkpoint.tensors)
    for prefix in prefixes:
        for name, tensor in checkpoint.tensors.items():
            if name.startswith(prefix):
                files.setdefault(name.removeprefix(prefix), tensor)
    return files


def _find(
    name: str, tensors: TensorMap, files: Mapping[str, Tensor], checkpoint: Checkpoint
) -> tuple[Tensor, Place]:
    place = tensors.place(name)
    if place is None:
        raise LoadError(
            f"{checkpoint.path}: the specification's [tensors] has no name for {name}; add one"
        )
    for file_name in place.names:
        if file_name in files:
            return files[file_name], place
    wanted = " or ".join(place.names)
    raise LoadError(
        f"{checkpoint.path}: no tensor {wanted}, which {name} is to be loaded from; "
        f"{nearest(wanted, files)}"
    )


def _check_all_used(
    model: AbstractModel,
    checkpoint: Checkpoint,
    tensors: TensorMap,
    files: Mapping[str, Tensor],
    found: Iterable[tuple[Tensor, Place]],
) -> None:
    """A tensor that the model does not use is a part of the model that the spec does not have."""
    used = {file.name for file, _ in found}
    used |= {files[name].name for name in _tied_names(model, tensors) if name in files}
    ignored = {
        file.name
        for name, file in files.items()  # a pattern may be written with the prefix or without
        if any(fnmatchcase(name, pattern) for pattern in tensors.ignore)
    }
    left = sorted({file.name for file in files.values()} - used - ignored)
    if left:
        shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        raise LoadError(
            f"{checkpoint.path}: the specification has no place for {shown}; "
            f"map them in [tensors], or list them under tensors.ignore"
        )


def _tied_names(model: AbstractModel, tensors: TensorMap) -> list[str]:
    """Names of a vocabulary head that is tied to the embedding, but stored a second time."""
    if "logits.weight" in model.names:
        return []
    place = tensors.place("logits.weight")
    return list(place.names) if place else []


def _part(
    file: Tensor,
    place: Place,
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
) -> np.ndarray:
    """A parameter's values: the whole tensor, or its part of a fused one."""
    values = file.read()
    if place.transpose and values.ndim == 2:
        values = values.T
    if not place.parts:
        return values
    rows = [shapes[part][0] for part in place.parts if part in shapes]
    groups = place.groups
    if (
        len(rows) < len(place.parts)
        or values.shape[:1] != (sum(rows),)
        or any(r % groups for r in rows)
    ):
        raise LoadError(
            f"{checkpoint.path}: {file.name} is {list(values.shape)}, which does not split into "
            f"{' + '.join(map(str, rows))} for {', '.join(place.parts)} in {groups} group(s)"
        )
    index = place.parts.index(name)
    begin = sum(rows[:index]) // groups
    grouped = values.reshape(groups, -1, *values.shape[1:])
    part = grouped[:, begin : begin + rows[index] // groups]
    return part.reshape(rows[index], *values.shape[1:])


__all__ = ["CheckpointError", "LoadError", "load"]

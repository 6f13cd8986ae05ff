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
from jinfer.origin import LoadError, Origin, find_origin
from jinfer.spec.tensors import TensorMap


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
    files = _by_name(checkpoint, tensors)
    shapes = dict(zip(model.names, (p.shape for p in model.parameters), strict=True))
    origins = {
        name: find_origin(name, shape, tensors, files, checkpoint) for name, shape in shapes.items()
    }
    _check_all_used(model, checkpoint, tensors, files, origins.values())
    bar = tqdm(
        total=sum(origin.nbytes for origin in origins.values()),
        desc="loading", unit="B", unit_scale=True, leave=False, disable=not progress,
    )  # fmt: skip
    lock = threading.Lock()

    def one(name: str, abstract: jax.ShapeDtypeStruct) -> Array:
        values = origins[name].read(shapes, abstract.dtype)
        if name in model.normalized:
            values = _unit_rows(values)
        array = jax.device_put(_convert(values, abstract.dtype))
        array.block_until_ready()
        with lock:
            bar.update(origins[name].nbytes)
        return array

    with bar, ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return tuple(pool.map(one, model.names, model.parameters))


def _unit_rows(values: np.ndarray) -> np.ndarray:
    """The rows of a matrix, each divided by its length."""
    rows = values.astype(np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _convert(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=dtype)


def _by_name(checkpoint: Checkpoint, tensors: TensorMap) -> dict[str, Tensor]:
    """The file's tensors by their names, also without a prefix and with the usual suffix."""
    files = dict(checkpoint.tensors)
    for prefix in tensors.prefixes:
        for name, tensor in checkpoint.tensors.items():
            if name.startswith(prefix):
                files.setdefault(name.removeprefix(prefix), tensor)
    for suffix, usual in tensors.suffixes:
        for name, tensor in list(files.items()):
            if name.endswith(f".{suffix}"):
                files.setdefault(name.removesuffix(suffix) + usual, tensor)
    return files


def _check_all_used(
    model: AbstractModel,
    checkpoint: Checkpoint,
    tensors: TensorMap,
    files: Mapping[str, Tensor],
    origins: Iterable[Origin],
) -> None:
    """A tensor that the model does not use is a part of the model that the spec does not have."""
    used = {file.name for origin in origins for file in origin.files}
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


__all__ = ["CheckpointError", "LoadError", "load"]

"""Loading: a checkpoint's tensors become the model's parameters, one at a time."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax import Array
from tqdm import tqdm

from jinfer.checkpoint import Checkpoint, CheckpointError
from jinfer.model import AbstractModel
from jinfer.origin import LoadError, by_name, find_origin, unused
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
    files = by_name(checkpoint, tensors)
    shapes = dict(zip(model.names, (p.shape for p in model.parameters), strict=True))
    origins = {
        name: find_origin(name, shape, tensors, files, checkpoint) for name, shape in shapes.items()
    }
    # A tensor that the model does not use is a part of the model that the spec does not have.
    if left := unused(model.names, tensors, files, origins.values()):
        shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        raise LoadError(
            f"{checkpoint.path}: the specification has no place for {shown}; "
            f"map them in [tensors], or list them under tensors.ignore"
        )
    for origin in origins.values():  # before any of them is read
        origin.check(shapes)
    # What several layers share is one array on the device as well.
    sources = {
        name: (origins[name].source(shapes), p.dtype, name in model.normalized)
        for name, p in zip(model.names, model.parameters, strict=True)
    }
    firsts = {source: name for name, source in reversed(sources.items())}
    bar = tqdm(
        total=sum(origins[name].nbytes for name in firsts.values()),
        desc="loading", unit="B", unit_scale=True, leave=False, disable=not progress,
    )  # fmt: skip
    lock = threading.Lock()

    def one(name: str) -> Array:
        dtype = sources[name][1]
        values = origins[name].read(shapes, dtype)
        if name in model.normalized:
            values = _unit_rows(values)
        array = jax.device_put(_convert(values, dtype))
        array.block_until_ready()
        with lock:
            bar.update(origins[name].nbytes)
        return array

    with bar, ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        arrays = dict(zip(firsts, pool.map(one, firsts.values()), strict=True))
    return tuple(arrays[sources[name]] for name in model.names)


def _unit_rows(values: np.ndarray) -> np.ndarray:
    """The rows of a matrix, each divided by its length."""
    rows = values.astype(np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _convert(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=dtype)


__all__ = ["CheckpointError", "LoadError", "load"]

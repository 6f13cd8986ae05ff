"""Loading: a checkpoint's tensors become the model's parameters, one at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import jax
import numpy as np

from jinfer.checkpoint import Checkpoint, CheckpointError
from jinfer.checkpoint.mapped_file import release
from jinfer.modelspec.tensor_names import TensorMap
from jinfer.nn.abstract_model import AbstractModel
from jinfer.progress import task
from jinfer.quant import OutlierTensor, QuantizedTensor
from jinfer.quant.calibration_stats import Inputs
from jinfer.quant.quantized_tensor import in_large_pages
from jinfer.weights.chunked_quantize import Watch, quantize_in_pieces
from jinfer.weights.load_time import PER_BYTE, per_weight
from jinfer.weights.row_slices import Rows, Wanted, rows_alone
from jinfer.weights.storage_plan import Storage
from jinfer.weights.tensor_mapping import (
    LoadError,
    Origin,
    Shapes,
    by_name,
    differing_copies,
    find_origin,
    unused,
)

_LARGE = 1 << 16  # bytes, of a parameter that is a matrix

# Puts a parameter, in NumPy's arrays, where it is to be; told the names that it has.
type Place = Callable[[Sequence[str], Any], Any]


def on_device(names: Sequence[str], values: Any) -> Any:
    """A parameter on the one device."""
    return jax.block_until_ready(jax.device_put(values))


def find_origins(
    model: AbstractModel, checkpoint: Checkpoint, tensors: TensorMap
) -> dict[str, Origin]:
    """Where each parameter of a model comes from.

    Args:
        tensors: the checkpoint's names for the parameters.

    Raises:
        LoadError: a parameter has no tensor, a tensor has no parameter, a shape differs, or a copy.
    """
    files = by_name(checkpoint, tensors)
    shapes = parameter_shapes(model)
    origins = {
        name: find_origin(name, shape, tensors, files, checkpoint) for name, shape in shapes.items()
    }
    # A tensor that the model does not use is a part of the model that the spec does not have.
    if left := unused(model.names, tensors, files, origins.values()):
        shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        raise LoadError(
            f"{checkpoint.path}: the specification has no place for {shown}; "
            f"map them in [{tensors.table}], or list them under {tensors.table}.ignore"
            f"{_by_when(tensors, left)}"
        )
    for origin in origins.values():  # before any of them is read
        origin.check(shapes)
    for _, reason in differing_copies(tensors, files, origins.values()):
        raise LoadError(f"{checkpoint.path}: {reason}")
    return origins


def _by_when(tensors: TensorMap, left: Sequence[str]) -> str:
    """Whose tensors they would be, but for conditions that are not fulfilled: a clause."""
    owners = tensors.owners_left_out(left)[:3]
    conditions = [f'{each.key} = "{each.when}"' for each in owners]
    return f"; left out by {' and '.join(conditions)}" if conditions else ""


def load(
    model: AbstractModel,
    origins: Mapping[str, Origin],
    storages: Mapping[str, Storage] | None = None,
    *,
    progress: bool = False,
    place: Place = on_device,
    only: Wanted | None = None,
) -> tuple[Any, ...]:
    """Loads the parameters of a model, in the order of `model.names`.

    Beyond the result, memory holds one decoded tensor per thread at a time.

    Args:
        model: all its parameters plain, in the types that they are to have.
        origins: of `find_origins`.
        storages: of the parameters that are to be quantized.
        progress: show a bar, also where nobody seems to watch; one of quantizing is shown anyhow.
        place: is given each parameter once.
        only: those that are read, where some rows are enough as `Rows`; None: all.

    Returns:
        What `place` gave for each: a JAX array or a `QuantizedTensor` of JAX arrays.

    Raises:
        LoadError: a tensor does not fit.
        CheckpointError: the file is broken.
    """
    storages, shapes = storages or {}, parameter_shapes(model)
    # What several layers share is one array on the device as well.
    same = same_arrays(model, origins, storages)
    wanted = [name for name in model.names if only is None or name in only]
    firsts = list(dict.fromkeys(same[name] for name in wanted))
    names = {first: [name for name in model.names if same[name] == first] for first in firsts}
    rates = {name: per_weight(storages.get(name)) for name in firsts}
    quantizes = any(rates.values())

    def reading(name: str) -> float:
        return origins[name].nbytes * (PER_BYTE if quantizes else 1)

    total = sum(reading(name) + rates[name] * prod(shapes[name]) for name in firsts)
    # A CPU takes arrays over where they are: that of all together is asked for in half the time.
    together = place is on_device and jax.default_backend() == "cpu"

    def one(name: str) -> Any:
        storage, rows = storages.get(name), _rows(names[name], only)
        alone = rows_alone(origins[name], shapes, storage, rows)
        origin, sizes = alone or (origins[name], shapes)

        def watch(_: Any, piece: np.ndarray, __: Inputs | None) -> None:
            bar.update(rates[name] * piece.size)

        values = read_parameter(model, origin, storage, watch=watch, shapes=sizes)
        if alone is not None and rows is not None:
            values = Rows(values, rows.start)
        placed = values if together else place(names[name], values)
        for file in origin.files:
            release(file.raw())
        bar.update(reading(name))
        return placed

    # Tables first, of which what is made on the way is largest, as long as there is the most room.
    roles = dict(zip(model.names, model.roles, strict=True))
    order = sorted(firsts, key=lambda name: roles[name] not in ("table", "head"))
    loading = task("loading", total, unit="B", shown=progress)
    if quantizes:
        loading = task("quantizing", total, unit="%", shown=progress or None)
    with loading as bar, ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        arrays = dict(zip(order, pool.map(one, order), strict=True))
    if together:
        arrays = on_device(order, arrays)
    return tuple(arrays[same[name]] for name in wanted)


def _rows(names: Sequence[str], only: Wanted | None) -> range | None:
    """The rows that are enough for all parameters that are one array."""
    each = {(only or {}).get(name) for name in names if only is None or name in only}
    return each.pop() if len(each) == 1 else None


def same_arrays(
    model: AbstractModel, origins: Mapping[str, Origin], storages: Mapping[str, Storage]
) -> dict[str, str]:
    """Each parameter's name -> that of the first one which is the same array."""
    shapes = parameter_shapes(model)
    dtypes = dict(zip(model.names, (p.dtype for p in model.parameters), strict=True))
    sources = {
        name: (origin.source(shapes), dtypes[name], name in model.normalized, storages.get(name))
        for name, origin in origins.items()
    }
    firsts = {source: name for name, source in reversed(sources.items())}
    return {name: firsts[source] for name, source in sources.items()}


def read_parameter(
    model: AbstractModel,
    origin: Origin,
    storage: Storage | None,
    inputs: Inputs | None = None,
    watch: Watch | None = None,
    *,
    shapes: Shapes | None = None,
) -> Any:
    """A parameter as it is stored, in NumPy's arrays.

    Args:
        storage: None: it is not quantized.
        inputs, watch: as for `quantized`.
        shapes: of all parameters, where that of this one is not the model's.
    """
    shapes = parameter_shapes(model) if shapes is None else shapes
    if storage is None:
        dtype = model.parameters[model.names.index(origin.parameter)].dtype
        values = np.ascontiguousarray(read_values(model, origin, shapes, dtype), dtype)
        return in_large_pages(values) if values.nbytes >= _LARGE else values
    if storage.kept:
        return storage.read(origin, shapes)
    return quantized(model, origin, shapes, storage, inputs, watch)


def read_values(model: AbstractModel, origin: Origin, shapes: Shapes, dtype: Any) -> np.ndarray:
    """A parameter's values, not quantized; as `Origin.read`."""
    values = origin.read(shapes, dtype)
    return _unit_rows(values) if origin.parameter in model.normalized else values


def quantized(
    model: AbstractModel,
    origin: Origin,
    shapes: Shapes,
    storage: Storage,
    inputs: Inputs | None = None,
    watch: Watch | None = None,
) -> QuantizedTensor | OutlierTensor:
    """A parameter that is not kept as it is; in pieces, if possible.

    Args:
        inputs: as for `Storage.quantize`.
        watch: is shown every piece, or the whole.
    """
    change = _unit_rows if origin.parameter in model.normalized else _same
    pieces = quantize_in_pieces(origin, shapes, storage, change, inputs, watch)
    if pieces is not None:
        return pieces
    values = read_values(model, origin, shapes, np.dtype(np.float32))
    tensor = storage.quantize(values, inputs)
    if watch is not None:
        watch(tensor, values, inputs)
    return tensor


def parameter_shapes(model: AbstractModel) -> dict[str, tuple[int, ...]]:
    """Each parameter's name -> its shape."""
    return dict(zip(model.names, (p.shape for p in model.parameters), strict=True))


def _unit_rows(values: np.ndarray) -> np.ndarray:
    """The rows of a matrix, each divided by its length."""
    rows = values.astype(np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _same(values: np.ndarray) -> np.ndarray:
    return values


__all__ = ["CheckpointError", "LoadError", "find_origins", "load"]

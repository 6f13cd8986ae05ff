"""Reading a parameter: from its tensors to the arrays that it is stored as."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jinfer.loader.weights.chunked_quantize import Watch, quantize_in_chunks
from jinfer.loader.weights.finite_check import refuse_nonfinite
from jinfer.loader.weights.storage_plan import Storage
from jinfer.loader.weights.tensor_mapping import Origin, Shapes, parameter_shapes
from jinfer.nn.abstract_model import AbstractModel
from jinfer.quant import OutlierTensor, QuantizedTensor
from jinfer.quant.calibration_stats import InputStats
from jinfer.quant.quantized_tensor import copy_to_huge_pages
from jinfer.quant.scaled_tensor import ScaledTensor, scaled_tensor

LARGE = 1 << 16  # bytes, of a parameter that is a matrix


def read_parameter(
    model: AbstractModel,
    origin: Origin,
    storage: Storage | None,
    inputs: InputStats | None = None,
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
        parameter = model.parameters[model.names.index(origin.parameter)]
        if isinstance(parameter, ScaledTensor):
            return read_scaled(origin, shapes)
        dtype = parameter.dtype
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found later
            values = np.ascontiguousarray(read_values(model, origin, shapes, dtype), dtype)
        return copy_to_huge_pages(values) if values.nbytes >= LARGE else values
    if storage.as_in_file:
        return storage.read(origin, shapes)
    return quantized(model, origin, shapes, storage, inputs, watch)


def read_scaled(origin: Origin, shapes: Shapes) -> ScaledTensor:
    """A matrix in FP8 as the checkpoint has it, in NumPy's arrays. Raises `CheckpointError`."""
    rows = origin.rows(shapes)
    parts = [(file.scaled.numbers(), file.scaled.scales()) for file in origin.files if file.scaled]
    each = [part if rows is None else part[..., rows, :] for pair in parts for part in pair]
    numbers, scales = each[::2], each[1::2]
    whole = (np.stack(part) if origin.stacked else part[0] for part in (numbers, scales))
    return jax.tree.map(copy_to_huge_pages, scaled_tensor(*whole))


def read_values(model: AbstractModel, origin: Origin, shapes: Shapes, dtype: Any) -> np.ndarray:
    """A parameter's values, not quantized; as `Origin.read`."""
    values = origin.read(shapes, dtype)
    return _unit_rows(values) if origin.parameter in model.normalized else values


def values_to_quantize(model: AbstractModel, origin: Origin, shapes: Shapes) -> np.ndarray:
    """A parameter's values in float32. Raises `LoadError` if they are not finite."""
    values = read_values(model, origin, shapes, np.dtype(np.float32))
    refuse_nonfinite(origin, values)
    return values


def quantized(
    model: AbstractModel,
    origin: Origin,
    shapes: Shapes,
    storage: Storage,
    inputs: InputStats | None = None,
    watch: Watch | None = None,
) -> QuantizedTensor | OutlierTensor:
    """A parameter quantized here; in chunks, if possible.

    Args:
        inputs: as for `Storage.quantize`.
        watch: is shown every piece, or the whole.

    Raises:
        LoadError: its values are not finite.
    """

    def change(values: np.ndarray) -> np.ndarray:
        refuse_nonfinite(origin, values)
        return _unit_rows(values) if origin.parameter in model.normalized else values

    pieces = quantize_in_chunks(origin, shapes, storage, change, inputs, watch)
    if pieces is not None:
        return pieces
    values = values_to_quantize(model, origin, shapes)
    tensor = storage.quantize(values, inputs)
    if watch is not None:
        watch(tensor, values, inputs)
    return tensor


def _unit_rows(values: np.ndarray) -> np.ndarray:
    """The rows of a matrix, each divided by its length."""
    rows = values.astype(np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)

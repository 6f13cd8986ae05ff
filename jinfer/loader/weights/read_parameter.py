"""Reading a parameter: its tensors become the arrays in which it is stored.

Matrices are quantized a few rows at a time. Numbers that are NaN or infinite are found in the same
pass: as integers, they are above the bits of infinity, with a sign bit for numbers above 0, and
without for numbers below. Two maxima find them, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np

from jinfer.loader.checkpoint import Tensor
from jinfer.loader.checkpoint.checkpoint_reader import DTYPES
from jinfer.loader.checkpoint.ggml_types import BLOCKS, PLAIN, decode
from jinfer.loader.weights.storage_plan import Storage
from jinfer.loader.weights.tensor_mapping import (
    PIECE,
    LoadError,
    Origin,
    Shapes,
    parameter_shapes,
    row_reader,
)
from jinfer.nn.abstract_model import AbstractModel
from jinfer.quant import OutlierTensor, QuantizedTensor
from jinfer.quant.calibration_stats import InputStats
from jinfer.quant.quantized_tensor import copy_to_huge_pages, empty_tensor
from jinfer.quant.scaled_tensor import ScaledTensor, scaled_tensor

if TYPE_CHECKING:
    from jaxtyping import Float


# Names of the parameters to read -> their rows; None: all rows.
type Selection = Mapping[str, range | None]


@dataclass(frozen=True)
class RowSlice:
    """Some rows of a parameter.

    Attributes:
        values: their values.
        begin: number of the first row.
    """

    values: Any
    begin: int


def row_slice(
    origin: Origin, shapes: Shapes, storage: Storage | None, rows: range | None
) -> tuple[Origin, Shapes] | None:
    """Return the origin of some rows of a parameter, and the shapes with only these rows.

    None if it has to be read as a whole: it is transposed or fused, or its rounding depends on all
    rows.
    """
    whole = shapes[origin.parameter]
    if rows is None or len(whole) != 2 + origin.stacked or not origin.is_rows(shapes):
        return None
    if origin.place.parts or (
        storage is not None and (storage.outliers or storage.method == "gptq")
    ):
        return None
    sliced = tuple(cut for tensor in origin.tensors if (cut := _slice(tensor, rows)) is not None)
    if len(sliced) < len(origin.tensors):
        return None
    shape = (*whole[:-2], len(rows), whole[-1])
    return replace(origin, tensors=sliced), {**shapes, origin.parameter: shape}


def _slice(tensor: Tensor, rows: range) -> Tensor | None:
    """Return a tensor of some rows of a matrix."""
    plain = tensor.type in DTYPES or tensor.type in PLAIN
    if (
        len(tensor.shape) != 2
        or tensor.nbytes % tensor.shape[0]
        or not (plain or tensor.type in BLOCKS)
    ):
        return None
    shape, row = (len(rows), tensor.shape[1]), tensor.nbytes // tensor.shape[0]

    def raw() -> np.ndarray:
        return tensor.raw()[rows.start * row : rows.stop * row]

    def read() -> np.ndarray:
        return tensor.read()[rows.start : rows.stop] if plain else decode(tensor.type, raw(), shape)

    return replace(tensor, shape=shape, nbytes=len(rows) * row, read=read, raw=raw)


LARGE = 1 << 16  # bytes, of a parameter that is a matrix


def read_parameter(
    model: AbstractModel,
    origin: Origin,
    storage: Storage | None,
    inputs: InputStats | None = None,
    watch: Watch | None = None,
    *,
    shapes: Shapes | None = None,
    on_nonfinite: Callable[[], object] | None = None,
) -> Any:
    """Read a parameter as it is stored, in NumPy's arrays.

    Args:
        storage: how it is quantized; None: it is not.
        inputs, watch: as for `quantized`.
        shapes: of all parameters, if the shape of this parameter is not the model's.
        on_nonfinite: called if a number is NaN or infinite, perhaps several times.
    """
    shapes = parameter_shapes(model) if shapes is None else shapes
    if storage is None:
        parameter = model.parameters[model.names.index(origin.parameter)]
        if isinstance(parameter, ScaledTensor):
            return reported(read_scaled(origin, shapes), on_nonfinite)
        dtype = parameter.dtype
        values = read_values(model, origin, shapes, dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # infinities are found by the check
            if values.size * dtype.itemsize < LARGE:
                return reported(np.ascontiguousarray(values, dtype), on_nonfinite)
            check = partial(reported, report=on_nonfinite) if on_nonfinite else None
            return copy_to_huge_pages(values, dtype, check)
    if storage.as_in_file:
        return reported(storage.read(origin, shapes), on_nonfinite)
    return reported(quantized(model, origin, shapes, storage, inputs, watch), on_nonfinite)


def reported(values: Any, report: Callable[[], object] | None) -> Any:
    """Return an array or a quantized parameter; call `report` if a number of it is not finite."""
    if report is not None and any(map(count_nonfinite, jax.tree.leaves(values))):
        report()
    return values


def read_scaled(origin: Origin, shapes: Shapes) -> ScaledTensor:
    """Read a matrix in FP8 with its scales, in NumPy arrays. Raises `CheckpointError`."""
    rows = origin.rows(shapes)
    parts = [
        (tensor.scaled.numbers(), tensor.scaled.scales())
        for tensor in origin.tensors
        if tensor.scaled
    ]
    arrays = [part if rows is None else part[..., rows, :] for pair in parts for part in pair]
    numbers, scales = arrays[::2], arrays[1::2]
    whole = (np.stack(part) if origin.stacked else part[0] for part in (numbers, scales))
    return jax.tree.map(copy_to_huge_pages, scaled_tensor(*whole))


def read_values(model: AbstractModel, origin: Origin, shapes: Shapes, dtype: Any) -> np.ndarray:
    """Read a parameter's values without quantizing them; see `Origin.read`."""
    values = origin.read(shapes, dtype)
    return _unit_rows(values) if origin.parameter in model.normalized else values


def values_to_quantize(model: AbstractModel, origin: Origin, shapes: Shapes) -> np.ndarray:
    """Read a parameter's values in float32. Raises `LoadError` if they are not finite."""
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
    """Quantize a parameter; in chunks, if possible.

    Args:
        inputs: as for `Storage.quantize`.
        watch: called with every chunk, or with the whole.

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
    """Divide each row of a matrix by its length."""
    rows = values.astype(np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


_CHECKED_BYTES = 1 << 20  # bytes, which stay in the cache for the second maximum


def count_nonfinite(values: np.ndarray) -> int:
    """Count the numbers of an array that are NaN or infinite; 0 for integers."""
    return sum(int(np.count_nonzero(~np.isfinite(piece))) for piece in _with_nonfinite(values))


def _with_nonfinite(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the pieces of an array that contain NaN or infinity."""
    kind = values.dtype
    if not _is_float(kind):
        return
    size = kind.itemsize
    signed, unsigned = np.dtype(f"i{size}"), np.dtype(f"u{size}")
    limits = ml_dtypes.finfo(kind)
    above = int(np.array(limits.max, kind).view(unsigned))  # the next code is infinity, or NaN
    below = int(np.array(limits.min, kind).view(unsigned))
    flat = np.ascontiguousarray(values).reshape(-1)
    for begin in range(0, flat.size, _CHECKED_BYTES // size):
        piece = flat[begin : begin + _CHECKED_BYTES // size]
        if piece.view(signed).max() > above or piece.view(unsigned).max() > below:
            yield piece


def _is_float(kind: np.dtype) -> bool:
    return kind.kind == "f" or (kind.kind == "V" and kind in _OTHER_FLOATS)


# Types whose codes above the largest number are all NaN or infinity, for both signs.
_OTHER_FLOATS = (
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2),
)


def nonfinite_tensor(origin: Origin) -> str:
    """Describe the first tensor of a parameter with numbers that are not finite."""
    for tensor in origin.tensors:
        if count := count_nonfinite(tensor.read()):
            return f"{tensor.name} has {count} numbers that are NaN or infinite"
    return f"{origin.parameter} has numbers that are infinite in the type that it is computed in"


def refuse_nonfinite(origin: Origin, values: np.ndarray) -> None:
    """Raise `LoadError` if values to be quantized are not finite: codes have no NaN."""
    if count_nonfinite(values):
        raise LoadError(
            f"{origin.path}: {nonfinite_tensor(origin)}, which cannot be quantized: get the file "
            f"again, or leave {origin.parameter} as it is: "
            f'quantization.rules = [{{ match = "{origin.parameter}", weights = "plain" }}]'
        )


# Called with each chunk, the values that it was quantized from, and its inputs, if they are known.
type Watch = Callable[
    [
        QuantizedTensor | OutlierTensor,
        Float[np.ndarray, "*stack outputs inputs"],
        InputStats | None,
    ],
    None,
]


def quantize_in_chunks(
    origin: Origin,
    shapes: Shapes,
    storage: Storage,
    change: Callable[[np.ndarray], np.ndarray],
    inputs: InputStats | None = None,
    watch: Watch | None = None,
) -> QuantizedTensor | None:
    """Quantize a parameter a few rows at a time, with a few MB of memory beyond the result.

    Args:
        change: applied to its rows first.
        inputs: as for `Storage.quantize`.
        watch: called with every chunk.

    Returns:
        None if it takes the whole matrix: it is transposed, its outliers have to be found, or GPTQ
        quantizes it.

    Raises:
        CheckpointError: the file is broken.
    """
    if storage.outliers or storage.method == "gptq" or not origin.is_rows(shapes):
        return None
    whole = empty_tensor(shapes[origin.parameter], storage.format, storage.columns)
    result = replace(whole, activations=storage.activations)
    height = max(1, PIECE // (result.rows * result.padded_inputs)) * result.rows
    numbers = origin.rows(shapes)
    for e, tensor in enumerate(origin.tensors):
        outer = (e,) if origin.stacked else ()
        read = row_reader(tensor)
        for index in np.ndindex(*tensor.shape[:-2]):
            matrix = result[(*outer, *index) or ...]
            for begin in range(0, matrix.outputs, height):
                rows: Any = slice(begin, min(begin + height, matrix.outputs))
                values = change(read(index, rows if numbers is None else numbers[rows]))
                own = of_matrix(inputs, (*outer, *index))
                piece = storage.quantize(values, own)
                assert isinstance(piece, QuantizedTensor), "there are no outliers"
                first = begin // result.rows
                pairs = zip(jax.tree.leaves(matrix), jax.tree.leaves(piece), strict=True)
                for target, part in pairs:
                    target[first : first + len(part)] = part
                if watch is not None:
                    watch(piece, values, own)
    return result


def of_matrix(inputs: InputStats | None, index: tuple[int, ...]) -> InputStats | None:
    """Return the inputs of a matrix of a stack."""
    if inputs is None or not inputs.rows.ndim:
        return inputs
    return InputStats(inputs.mean[index], inputs.rows[index])

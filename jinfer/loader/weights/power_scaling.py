"""Scaling rows of a parameter by powers of two, in any form that it is stored in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jinfer.loader.weights.read_parameter import LARGE, RowSlice
from jinfer.quant import OutlierTensor, QuantizedTensor, ReorderedTensor
from jinfer.quant.quantized_tensor import copy_to_huge_pages
from jinfer.quant.scaled_tensor import ScaledTensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_SAMPLE = 256  # inputs of a row that its magnitude is measured by, about


@dataclass(frozen=True)
class Magnitude:
    """The magnitude of the rows of a parameter.

    Attributes:
        squares: sum of the squares of each row.
        largest: largest magnitude of its float16 numbers; 0 if it has none.
    """

    squares: Float[np.ndarray, " rows"]
    largest: float


@dataclass(frozen=True)
class PowerScale:
    """Powers of two that the rows of a parameter are multiplied by when it is loaded.

    Attributes:
        exponents: of each row, or of as many leading axes as it has.
        offset: is added to each number when it is used.
    """

    exponents: Int[np.ndarray, " *rows"]
    offset: float

    def of(self, values: Any) -> Any:
        """A parameter, in NumPy's arrays, or some rows of it, multiplied."""
        if isinstance(values, RowSlice):
            exponents = self.exponents[values.begin : values.begin + values.values.shape[0]]
            return replace(values, values=times_powers(values.values, exponents, self.offset))
        return jax.tree.map(_in_large_pages, times_powers(values, self.exponents, self.offset))


def magnitude(values: Any, offset: float = 0.0) -> Magnitude:
    """Measure a matrix [rows, inputs] by some of its inputs, or a vector [rows].

    Args:
        values: NumPy arrays.
        offset: added to each number first.
    """
    largest = max((_largest(part) for part in _factors(values)), default=0.0)
    matrix: Any
    if isinstance(values, OutlierTensor | ReorderedTensor | ScaledTensor):
        matrix, inputs = np.asarray(values.dequantize()), values.shape[1]
    elif isinstance(values, QuantizedTensor):
        matrix, inputs = _sampled(values).dequantize(), values.inputs
    elif values.ndim == 1:
        matrix, inputs = np.asarray(values)[:, None], 1
    else:
        inputs = values.shape[1]
        matrix = np.asarray(values[:, :: max(1, inputs // _SAMPLE)])
    wide = matrix.astype(np.float64) + offset
    return Magnitude((wide**2).mean(axis=1) * inputs, largest)


def times_powers(values: Any, exponents: Int[np.ndarray, " *rows"], offset: float = 0.0) -> Any:
    """Row i times 2 to exponents[i]; NumPy's arrays, or others, which become NumPy's.

    Args:
        exponents: of each row, or of as many leading axes as it has.
        offset: is added to each number when it is used, and so is a part of what is multiplied.
    """
    values = jax.tree.map(np.asarray, values)
    powers = np.ldexp(np.float32(1), exponents)
    if isinstance(values, OutlierTensor):
        of_rows = np.append(powers, np.float32(1))[values.outliers.rows]  # the last: of no row
        sparse = replace(values.outliers, values=values.outliers.values * of_rows)
        return replace(values, rounded=times_powers(values.rounded, exponents), outliers=sparse)
    if isinstance(values, ReorderedTensor):
        return replace(values, rounded=times_powers(values.rounded, exponents))
    if isinstance(values, ScaledTensor):
        return replace(values, scales=values.scales * _of_rows(powers, values.ndim))
    if isinstance(values, QuantizedTensor):
        field = "scales" if values.steps is None else "steps"
        numbers: Any = getattr(values, field)
        every = np.ones(numbers.shape[0] * values.rows, np.float32)
        every[: len(powers)] = powers
        tiles = every.reshape(-1, 1, values.rows, 1, 1)
        changed = (numbers.astype(np.float32) * tiles).astype(numbers.dtype)
        return replace(values, **{field: changed})
    rows = _of_rows(powers, values.ndim)
    wide = (values.astype(np.float32) + np.float32(offset)) * rows - np.float32(offset)
    return wide.astype(values.dtype)


def _of_rows(powers: np.ndarray, axes: int) -> np.ndarray:
    return powers.reshape(*powers.shape, *(1,) * (axes - powers.ndim))


def _factors(values: Any) -> list[np.ndarray]:
    """The arrays whose numbers `times_powers` changes."""
    if isinstance(values, OutlierTensor):
        return [*_factors(values.rounded), values.outliers.values]
    if isinstance(values, ReorderedTensor):
        return _factors(values.rounded)
    if isinstance(values, QuantizedTensor):
        return [values.scales if values.steps is None else values.steps]
    if isinstance(values, ScaledTensor):
        return [values.scales]
    return [values]


def _in_large_pages(array: np.ndarray) -> np.ndarray:
    return copy_to_huge_pages(array) if array.nbytes >= LARGE else array


def _largest(part: np.ndarray) -> float:
    return float(np.abs(part).max(initial=0)) if part.dtype == np.float16 else 0.0


def _sampled(tensor: QuantizedTensor) -> QuantizedTensor:
    """Take some superblocks of a matrix at even distances, except the last, which has padding."""
    superblocks, numbers = tensor.words.shape[1], tensor.scales.shape[1]
    share = superblocks // numbers
    if numbers < 2:
        return tensor
    width = tensor.padded_inputs // superblocks
    count = max(1, min(numbers - 1, -(-_SAMPLE // (width * share))))
    blocks = np.linspace(0, numbers - 1, count, endpoint=False).astype(np.int64)
    words = (blocks[:, None] * share + np.arange(share)[None]).ravel()
    return QuantizedTensor(
        tensor.words[:, words],
        tensor.scales[:, blocks],
        None if tensor.steps is None else tensor.steps[:, words],
        tensor.format,
        tensor.outputs,
        len(words) * width,
    )

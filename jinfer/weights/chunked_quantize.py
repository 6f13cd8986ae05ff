"""Quantizing in chunks: a few rows at a time, so that no matrix is ever decoded as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jinfer.quant import OutlierTensor, QuantizedTensor
from jinfer.quant.calibration_stats import InputStats
from jinfer.quant.quantized_tensor import empty_tensor
from jinfer.weights.row_reader import PIECE as _PIECE
from jinfer.weights.row_reader import row_reader
from jinfer.weights.storage_plan import Storage
from jinfer.weights.tensor_mapping import Origin, Shapes

if TYPE_CHECKING:
    from jaxtyping import Float

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
    """A parameter as `Storage.quantize` gives it, with a few MB of memory beyond the result.

    Args:
        change: applied to its rows first.
        inputs: as for `Storage.quantize`.
        watch: is called with every chunk.

    Returns:
        None where it takes the whole matrix: it is transposed, its outliers have to be found, or
        GPTQ quantizes it.

    Raises:
        CheckpointError: the file is broken.
    """
    if storage.outliers or storage.method == "gptq" or not origin.is_rows(shapes):
        return None
    whole = empty_tensor(shapes[origin.parameter], storage.format, storage.columns)
    result = replace(whole, activations=storage.activations)
    height = max(1, _PIECE // (result.rows * result.padded_inputs)) * result.rows
    numbers = origin.rows(shapes)
    for e, file in enumerate(origin.files):
        outer = (e,) if origin.stacked else ()
        read = row_reader(file)
        for index in np.ndindex(*file.shape[:-2]):
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
    """What one matrix of a stack was multiplied with."""
    if inputs is None or not inputs.rows.ndim:
        return inputs
    return InputStats(inputs.mean[index], inputs.rows[index])

"""Quantization report: size and error of each format in a converted checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jinfer.loader.weights.storage_plan import Storage
from jinfer.loader.weights.tensor_mapping import Origin
from jinfer.quant import OutlierTensor, QuantizedTensor
from jinfer.quant.calibration_stats import InputStats
from jinfer.quant.quantized_tensor import to_codes
from jinfer.quant.round_to_nearest import dequantize, split_into_blocks

_ROWS = 256  # of a matrix whose results are compared, about
BITS = "of a weight, with its share of scales, bases and padding"
ERRORS = "of the weights, and of their products with the inputs that were read; root mean square"
UNKNOWN = (
    "products with inputs were not measured, as no text was read, and the error of weights alone "
    "does not rank methods: below 5 bits that of gptq is larger, and it loses several times "
    "less quality; --method gptq and --calibration TEXT read one"
)


@dataclass(frozen=True)
class FormatRow:
    """Parameters of the same format.

    Attributes:
        format: "q4", "Q4_1 as it was", "float32".
        parameters, weights, nbytes: their numbers and size.
        error: root of the mean squared error over that of the mean square; None: not quantized.
        outputs: the same for the outputs on the recorded inputs, a mean over matrices; None:
            nothing was recorded.
    """

    format: str
    parameters: int
    weights: int
    nbytes: int
    error: float | None
    outputs: float | None = None

    @property
    def bits(self) -> float:
        """Bits per weight, everything included."""
        return 8 * self.nbytes / max(1, self.weights)


@dataclass
class ErrorSums:
    """Sums of squares over all pieces of a quantized parameter.

    Attributes:
        squares, errors: of its weights and of their errors.
        given, wrong: of its outputs on the recorded inputs, and of their errors.
    """

    squares: float = 0.0
    errors: float = 0.0
    given: float = 0.0
    wrong: float = 0.0

    def add(
        self,
        tensor: QuantizedTensor | OutlierTensor,
        values: np.ndarray,
        inputs: InputStats | None = None,
    ) -> None:
        """Add a tensor, and the values it was quantized from."""
        rounded = tensor.rounded if isinstance(tensor, OutlierTensor) else tensor
        values = values.astype(np.float32)  # sums of squares are beyond float16
        for index in np.ndindex(*rounded.stack):
            ours = _values(rounded[index or ...])
            if isinstance(tensor, OutlierTensor):
                import jax

                sparse = jax.tree.map(lambda part, i=index: part[i], tensor.outliers)
                there = sparse.rows < sparse.outputs
                ours[sparse.rows[there], sparse.columns[there]] += sparse.values[there]
            difference = ours - values[index]
            self.errors += float(np.vdot(difference, difference))
            if inputs is not None:
                mean = inputs.mean[index]
                self.given += _energy(values[index], mean)
                self.wrong += _energy(difference, mean)
        self.squares += float(np.vdot(values, values))

    @property
    def outputs(self) -> float | None:
        """The relative squared error of the outputs; None if unknown."""
        return self.wrong / self.given if self.given else None


@dataclass(frozen=True)
class WrittenParameter:
    """A parameter that was written.

    Attributes:
        format: as in `FormatRow`.
        weights, nbytes: number and size.
        measured: its errors; None if not quantized.
    """

    format: str
    weights: int
    nbytes: int
    measured: ErrorSums | None = field(default=None)


def done(
    tensor: Any, storage: Storage | None, origin: Origin, measured: ErrorSums
) -> WrittenParameter:
    """The report of a written parameter."""
    count = math.prod(tensor.shape)
    if storage is None:
        return WrittenParameter(str(tensor.dtype), count, tensor.nbytes)
    if storage.as_in_file:
        return WrittenParameter(
            f"{origin.tensors[0].type} as it was", count, tensor.nbytes, ErrorSums(1.0)
        )
    label = storage.format.name + (" and outliers" if isinstance(tensor, OutlierTensor) else "")
    return WrittenParameter(label, count, tensor.nbytes, measured)


def summary(rows: Sequence[WrittenParameter]) -> list[FormatRow]:
    """A row for each format, the quantized ones first."""
    formats = dict.fromkeys(row.format for row in sorted(rows, key=lambda row: not row.measured))
    found = []
    for format in formats:
        alike = [row for row in rows if row.format == format]
        measured = [row.measured for row in alike if row.measured is not None]
        squares, errors = (sum(getattr(m, n) for m in measured) for n in ("squares", "errors"))
        known = [
            (row.weights, row.measured.outputs)
            for row in alike
            if row.measured is not None and row.measured.outputs is not None
        ]
        count = sum(weights for weights, _ in known)
        found.append(
            FormatRow(
                format,
                len(alike),
                sum(row.weights for row in alike),
                sum(row.nbytes for row in alike),
                math.sqrt(errors / squares) if squares else None,
                math.sqrt(sum(w * error for w, error in known) / count) if known else None,
            )
        )
    return found


def to_text(rows: Sequence[FormatRow]) -> str:
    """A table of all formats and the total, with an explanation of its columns."""
    head = f"{'format':<20}{'parameters':>11}{'weights':>15}{'MiB':>10}{'bits':>8}"
    lines = [f"{head}{'error':>9}{'outputs':>9}"]
    for row in (*rows, total(rows)):
        error, outputs = ("" if x is None else f"{x:.2%}" for x in (row.error, row.outputs))
        lines.append(
            f"{row.format:<20}{row.parameters:>11}{row.weights:>15,}"
            f"{row.nbytes / 2**20:>10.1f}{row.bits:>8.3f}{error:>9}{outputs:>9}"
        )
    lines.append(f"bits: {BITS}")
    if any(row.error for row in rows):
        read = any(row.outputs is not None for row in rows)
        lines.append(f"error, outputs: {ERRORS}" if read else f"outputs: {UNKNOWN}")
    return "\n".join(lines)


def total(rows: Sequence[FormatRow]) -> FormatRow:
    """The sum over all parameters."""
    parameters, weights = sum(row.parameters for row in rows), sum(row.weights for row in rows)
    return FormatRow("all", parameters, weights, sum(row.nbytes for row in rows), None)


def _values(matrix: QuantizedTensor) -> np.ndarray:
    """A dequantized matrix of NumPy arrays, without compiling anything."""
    codes, numbers, _ = to_codes(matrix)
    base = None if matrix.format.symmetric else numbers[..., 1]
    blocks = dequantize(
        split_into_blocks(codes, matrix.format.block), numbers[..., 0], base, matrix.format
    )
    return blocks.reshape(codes.shape)[:, : matrix.inputs]


def _energy(rows: np.ndarray, mean: np.ndarray) -> float:
    """Mean square of the outputs of some rows for inputs of these second moments, summed.

    Args:
        mean: of the inputs' products [inputs, inputs], or of their squares [inputs].
    """
    rows = rows[:: max(1, len(rows) // _ROWS)]
    weighted = rows * mean if mean.ndim == 1 else rows @ mean
    return max(0.0, float(np.vdot(weighted, rows)))

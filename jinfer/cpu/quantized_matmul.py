"""Quantized matmul as one custom call.

Matrices are the arrays and the format of a `QuantizedTensor`. Activations are float32 rows,
quantized to integers in blocks of 32; a block that is not finite makes its products NaN. An
integer has one digit in mode "int8", -127 .. 127 with scale = largest magnitude / 127, and two in
base 253 in mode "int16". Mode "float" has three, the last of which counts 1.2e-7 of the block's
largest magnitude, as much as its last bit does in float32. Products with digits are integer sums,
scaled and added up in float32.

Mode "bf16" is "int8" but for many rows (`kBf16MinRows` in linear_bf16_tiles.h) on a processor with
AMX: there activations, and weights with their scales and bases, are rounded to bfloat16. A row's
bits then depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from jax import Array

from jinfer.cpu.build_library import custom_call

if TYPE_CHECKING:
    from jaxtyping import Float, Int

type Mode = Literal["int8", "int16", "float", "bf16"]
# Of 8 bits; -1 is `kBf16Prompts` of linear.h.
_DIGITS: dict[Mode, int] = {"int8": 1, "int16": 2, "float": 3, "bf16": -1}
# Indexed by `Activation` of activation.h; a matmul's GLU takes those up to relu.
ACTIVATIONS = (
    "none",
    "silu",
    "gelu_tanh",
    "relu",
    "gelu",
    "quick_gelu",
    "relu2",
    *("sigmoid", "softplus", "exp", "expm1", "log1p", "tanh"),
)
_MAX_CODEBOOK = 16


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized matrix, or a stack of them, in the layout of `QuantizedTensor`.

    Attributes:
        words: uint32 [*stack, tiles, superblocks, bits, R, G], at most one axis of stack.
        scales: float16, or int8 with `steps`, [*stack, tiles, superblocks, R, S, numbers].
        steps: float16 [*stack, tiles, superblocks, R, S', numbers], or None.
        outputs: without padding.
        block: weights that share a scale.
        per_code: weights of a code, 2 for 11 x + y.
        zero: the code of 0 where blocks have no base.
        codebook: the codes' values, at most 16, where they are not evenly spaced.
    """

    words: Array
    scales: Array
    steps: Array | None
    outputs: int
    block: int
    per_code: int = 1
    zero: int = 0
    codebook: tuple[int, ...] | None = None


def supports(matrix: QuantizedMatrix) -> bool:
    """Whether the call has kernels for a matrix.

    It has for all formats but codebooks of over 16 values, in the layout of `columns_of`.
    """
    if matrix.words.shape[-1] != (2 if matrix.steps is None else 8):
        return False
    return matrix.codebook is None or (
        len(matrix.codebook) <= _MAX_CODEBOOK and matrix.scales.shape[-1] == 1
    )


def quantized_linear(
    x: Float[Array, "rows inputs"],
    matrices: Sequence[QuantizedMatrix],
    *,
    mode: Mode = "int8",
    activation: str = "none",
    index: Int[Array, ""] | None = None,
    offsets: Int[Array, " experts_1"] | None = None,
) -> tuple[Float[Array, "rows outputs"], ...]:
    """x @ matrix.T for each matrix, in float32; x is quantized once for all of them.

    Args:
        x: float32.
        matrices: of equal inputs.
        activation: other than "none": there are two matrices, gate and up, of equal shape and
            layout, and the one result is activation(x @ gate.T) * (x @ up.T).
        index: int32, which matrix of each stack.
        offsets: int32 [stack + 1]: rows offsets[i] .. offsets[i + 1] - 1 are multiplied with
            matrix i of each stack, other rows of the result are undefined. Only the matrices that
            have rows are read.
    """
    select, selector = selection(index, offsets)
    operands: list[Any] = [x, *selector]
    for matrix in matrices:
        operands += [matrix.words, matrix.scales]
        operands += [] if matrix.steps is None else [matrix.steps]
    results = matrices if activation == "none" else matrices[:1]
    rows = x.shape[0]
    shapes = [jax.ShapeDtypeStruct((rows, matrix.outputs), np.float32) for matrix in results]
    codebook = next((m.codebook for m in matrices if m.codebook is not None), ())
    call = custom_call("jinfer_linear", shapes)
    out = call(
        *operands,
        tensors=np.array([fields_of(matrix) for matrix in matrices], np.int64).reshape(-1),
        codebook=np.array(codebook, np.int64),
        digits=np.int64(_DIGITS[mode]),
        activation=np.int64(ACTIVATIONS.index(activation)),
        select=np.int64(select),
    )
    return tuple(out)


def selection(index: Array | None, offsets: Array | None) -> tuple[int, list[Array]]:
    """How a stack's matrix is selected: `ExpertSelect` of expert_select.h, and its operand."""
    if index is not None:
        return 1, [index.reshape(1)]
    return (0, []) if offsets is None else (2, [offsets])


def fields_of(matrix: QuantizedMatrix) -> list[int]:
    """A matrix's format as the calls expect it: the numbers of `Field` in linear_driver.h."""
    return [
        matrix.words.shape[-3],
        matrix.per_code,
        matrix.block,
        matrix.scales.shape[-1],
        matrix.zero,
        int(matrix.steps is not None),
        int(matrix.codebook is not None),
        matrix.outputs,
    ]

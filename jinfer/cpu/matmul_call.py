"""Matrix products as custom calls: quantized, dense, LoRA's low-rank terms, and MoE routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np
from jax import Array

from jinfer.cpu.build_library import custom_call

if TYPE_CHECKING:
    from jaxtyping import Float, Float8e4m3fn, Int

type Mode = Literal["int8", "int16", "float", "bf16"]
# Digits of 8 bits; -1 is `kBf16Prompts` of linear.h.
_DIGITS: dict[Mode, int] = {"int8": 1, "int16": 2, "float": 3, "bf16": -1}
# Indexed by `Activation` of activation.h; a matmul's GLU supports the names up to relu.
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
        zero: the code of 0 if blocks have no base.
        codebook: the codes' values, at most 16, if they are not evenly spaced.
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

    It supports all formats except codebooks of over 16 values, in the layout of `columns_of`.
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
    """Computes x @ matrix.T for each matrix, in float32; x is quantized once for all of them.

    Args:
        x: float32.
        matrices: with equal inputs.
        activation: other than "none": there are two matrices, gate and up, of equal shape and
            layout, and the one result is activation(x @ gate.T) * (x @ up.T).
        index: int32, the matrix to use of each stack.
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
    """Returns the selection of a stack's matrix (`ExpertSelect` of expert_select.h) and operand."""
    if index is not None:
        return 1, [index.reshape(1)]
    return (0, []) if offsets is None else (2, [offsets])


def fields_of(matrix: QuantizedMatrix) -> list[int]:
    """Encodes a matrix's format for the calls: the numbers of `Field` in linear_driver.h."""
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


class ScaledMatrix(NamedTuple):
    """A matrix in FP8, E4M3, or a stack of them; each block of a row's inputs has a scale.

    A block is a power of two of at least 32 inputs, or the row; the shapes determine it.
    """

    numbers: Float8e4m3fn[Array, "*stack outputs inputs"]
    scales: Float[Array, "*stack outputs blocks"]


def dense_linear(
    x: Float[Array, "rows inputs"],
    weights: Sequence[Float[Array, "*stack outputs inputs"] | ScaledMatrix],
    *,
    activation: str = "none",
    index: Int[Array, ""] | None = None,
    offsets: Int[Array, " experts_1"] | None = None,
    transposed: bool = False,
    part: slice | None = None,
    rounded: bool = False,
) -> tuple[Float[Array, "rows outputs"], ...]:
    """Computes x @ weight.T for each weight, in float32; x is prepared once for all of them.

    Args:
        x: float32.
        weights: float32, bfloat16 or float16, converted to float32 without loss, or scaled, with
            each number times its scale rounded to float32.
        activation: other than "none": there are two weights, gate and up, of equal shape, and the
            one result is activation(x @ gate.T) * (x @ up.T).
        index, offsets: as in `quantized_linear`; with either, weights have three axes, else two.
        transposed: weights are [inputs, outputs] instead: x @ weight. Not for scaled weights.
        part: a slice of each matrix's rows to use.
        rounded: allows rounding x to bfloat16 for bfloat16 weights, on processors with bfloat16 dot
            products or tiles (AVX-512 BF16, AMX).
    """
    results = weights if activation == "none" else weights[:1]
    outputs = [(w.numbers if isinstance(w, ScaledMatrix) else w).shape[-2:] for w in results]
    first, end, _ = (part or slice(None)).indices(outputs[0][0])
    widths = [w[1] if transposed else end - first if part else w[0] for w in outputs]
    shapes = [jax.ShapeDtypeStruct((x.shape[0], width), np.float32) for width in widths]
    select, selector = selection(index, offsets)
    out = custom_call("jinfer_dense", shapes)(
        x,
        *selector,
        *jax.tree.leaves(list(weights)),
        activation=np.int64(ACTIVATIONS.index(activation)),
        select=np.int64(select),
        transposed=np.bool_(transposed),
        first=np.int64(first),
        taken=np.int64(end - first if part else 0),
        rounded=np.bool_(rounded),
    )
    return tuple(out)


def add_lora(
    x: Float[Array, "rows inputs"],
    ys: Sequence[Float[Array, "rows outputs"]],
    slots: Int[Array, " rows"],
    scales: Float[Array, " rows"],
    order: Int[Array, " rows"],
    a: Sequence[Float[Array, "slots rank inputs"]],
    b: Sequence[Float[Array, "slots rank outputs"]],
    factors: Sequence[Float[Array, "slots 2 rank"] | None],
) -> tuple[Float[Array, "rows outputs"], ...]:
    """Computes y + scale * (x A^T) B for each y, with A and B of the row's slot, in float32.

    The result is batch-invariant; a row without an adapter keeps y's bits.

    Args:
        x, ys: float32.
        slots: int32; from 1; 0: the row has no adapter.
        scales: float32.
        order: int32; the rows sorted by slot, so that each slot's matrices are read once.
        a, b: float32, bfloat16, float16 or int8; a stack for each y.
        factors: float32; for int8 stacks: factors of the rows of A, and of B.
    """
    shapes = [jax.ShapeDtypeStruct(y.shape, np.float32) for y in ys]
    in_place = {1 + i: i for i in range(len(ys))}
    second = [part for pair in zip(b, factors, strict=True) for part in pair if part is not None]
    call = custom_call("jinfer_lora", shapes, aliases=in_place)
    return tuple(call(x, *ys, slots, scales, order, *a, *second))


def route(
    logits: Float[Array, "rows experts"],
    correction: Float[Array, " experts"] | None,
    top_k: int,
    *,
    softmax: bool,
    renormalize: bool,
    scale: float,
) -> tuple[Int[Array, "rows top_k"], Float[Array, "rows top_k"]]:
    """Returns each row's top-k experts, the lower index among equals, and their weights.

    Args:
        logits: float32.
        correction: added to the scores for the selection only.
        softmax: scores are a softmax of the logits; else sigmoids of the logits.
        renormalize: weights are scores over their sum, else the scores; either times `scale`.
    """
    shape = logits.shape[0], top_k
    results = [jax.ShapeDtypeStruct(shape, kind) for kind in (np.int32, np.float32)]
    chosen, weights = custom_call("jinfer_route", results)(
        logits,
        *([] if correction is None else [correction]),
        softmax=np.bool_(softmax),
        renormalize=np.bool_(renormalize),
        scale=np.float32(scale),
    )
    return chosen, weights


class Sorted(NamedTuple):
    """Pairs of row and expert, sorted by expert and then by row.

    Attributes:
        row_of, expert_of: row and expert of each sorted pair.
        offsets: pairs offsets[i] .. offsets[i + 1] - 1 are expert i's.
        place_of: sorted index of each pair, in the order before sorting.
    """

    row_of: Int[Array, " pairs"]
    expert_of: Int[Array, " pairs"]
    offsets: Int[Array, " experts_1"]
    place_of: Int[Array, " pairs"]


def sort_by_expert(chosen: Int[Array, "rows top_k"], experts: int) -> Sorted:
    """Sorts pairs of row and expert by expert; `chosen` is int32 and below `experts`."""
    sizes = chosen.size, chosen.size, experts + 1, chosen.size
    results = [jax.ShapeDtypeStruct((size,), np.int32) for size in sizes]
    return Sorted(*custom_call("jinfer_sort_by_expert", results)(chosen))


def combine_experts(
    results: Float[Array, "pairs hidden"],
    place_of: Int[Array, " pairs"],
    weights: Float[Array, "rows top_k"],
) -> Float[Array, "rows hidden"]:
    """Sums each row's weighted expert results in the order of its experts, all float32."""
    shape = jax.ShapeDtypeStruct((weights.shape[0], results.shape[1]), np.float32)
    out: Array = custom_call("jinfer_combine_experts", shape)(results, place_of, weights)
    return out

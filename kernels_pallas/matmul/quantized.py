"""Quantized matmul on a GPU: choice of kernel, tiling and back end; dequantization."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.matmul import triton
from kernels_pallas.matmul.grid import LARGEST, SMALLEST, Tiling, choose_tiling, row_tiles
from kernels_pallas.matmul.prologue import (
    PreparedRows,
    PrologueOperand,
    fits,
    identity,
    prepare_rows,
)
from kernels_pallas.matmul.round_fp16 import round_rows, rounded_matmul
from kernels_pallas.matmul.triton import numbers_of, operands, weights
from kernels_pallas.matmul.weight_layout import PackedMatrix, arrange_inputs
from kernels_pallas.triton_ops import DEFAULT, Backend, first_program_id, plt

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_OUTPUTS = 16  # per program: four warps, 16 bytes of each word per thread


def dequantize(
    matrices: Sequence[PackedMatrix], index: Int[Array, 1], *, interpret: bool = False
) -> Float[Array, "outputs padded_inputs"]:
    """Dequantizes matrices to fp16, stacked vertically, inputs in the order of a kernel's slices.

    Args:
        matrices: with x in the same order.
    """
    first, parts = matrices[0], [operands(matrix) for matrix in matrices]
    outputs = sum(matrix.outputs for matrix in matrices)
    shape = (outputs, first.superblocks, 16 * first.per_code, 2 * first.columns)
    counts = [-(-matrix.outputs // _OUTPUTS) for matrix in matrices]
    kernel = functools.partial(
        _decode_kernel,
        matrices=matrices,
        operands=[len(part) for part in parts],
        tiles=counts,
        asm=not interpret,
    )
    (whole,) = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float16)],
        grid=(sum(counts), first.superblocks),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="decode_matrices",
    )(index, *chain.from_iterable(parts))
    return jnp.asarray(whole).reshape(outputs, -1)


def _decode_kernel(
    index_ref: Any,
    *refs: Any,
    matrices: Sequence[PackedMatrix],
    operands: Sequence[int],
    tiles: Sequence[int],
    asm: bool,
) -> None:
    *in_refs, out_ref = refs
    left = iter(in_refs)
    tile, superblock, index = first_program_id(asm=asm), pl.program_id(1), index_ref[0]
    ends = list(accumulate(tiles))
    above = [0, *accumulate(matrix.outputs for matrix in matrices)]
    for matrix, count, end, size, row in zip(matrices, operands, ends, tiles, above, strict=False):
        words_ref, *number_refs = islice(left, count)

        def compute(
            matrix: PackedMatrix = matrix,
            words_ref: Any = words_ref,
            number_refs: Sequence[Any] = number_refs,
            begin: int = end - size,
            row: int = row,
        ) -> None:
            # The last tile of a matrix begins earlier if outputs do not divide.
            start = jnp.minimum((tile - begin) * _OUTPUTS, matrix.outputs - _OUTPUTS)
            outputs = pl.ds(start, _OUTPUTS)
            words = [words_ref[index, outputs, superblock, t, :] for t in range(matrix.bits)]
            numbers = numbers_of(matrix, number_refs, (index, outputs, superblock), asm)
            to = pl.ds(row + start, _OUTPUTS)
            for number, w in weights(matrix, words, numbers, number_refs[-1], asm):
                out_ref[to, superblock, number, :] = w

        if len(matrices) == 1:
            compute()
        else:
            pl.when((tile >= end - size) & (tile < end))(compute)


KERNEL_ROWS = 128  # above, dequantizing once and a plain matmul are cheaper


def matmul(
    x: Float[Array, "rows inputs"],
    matrices: Sequence[PackedMatrix],
    *,
    index: Int[Array, 1] | None = None,
    gated: bool = False,
    backend: Backend = DEFAULT,
    interpret: bool = False,
) -> tuple[Float[Array, "rows outputs"], ...]:
    """Computes x @ matrix.T for each matrix, in float32; rounds x to fp16 with a scale per row.

    Args:
        matrices: stacks whose matrices all read x, such as queries, keys and values; one call reads
            x once.
        index: the matrix of the (flattened) stacks; required if there are several. It is read
            inside the kernel, so that a matrix of a stack is never copied.
        gated: two matrices, gate and up; the one result is silu(x @ gate.T) * (x @ up.T).
        backend: "triton", or "xla": plain XLA, which dequantizes the weights to memory.
        interpret: runs the kernel without a GPU, slowly.

    Raises:
        ValueError: x and a matrix do not fit together.
    """
    for matrix in matrices:
        if x.shape[1] != matrix.inputs:
            raise ValueError(
                f"x has {x.shape[1]} inputs, the matrix {matrix.inputs}; give it all of them"
            )
    if gated and len(matrices) != 2:
        raise ValueError(f"a gated product takes the matrices gate and up, not {len(matrices)}")
    if backend == "xla":
        return _epilogue(matmul_xla(x, matrices, index), gated)

    def product(chosen: Sequence[PackedMatrix]) -> tuple[Array, ...]:
        if not all(map(kernel_supports, chosen)):
            return matmul_xla(x, chosen, index)
        return _kernel(x, chosen, index, interpret)

    return _epilogue(_by_group(matrices, product), gated)


def kernel_supports(matrix: PackedMatrix) -> bool:
    """Whether the kernel supports the matrix; otherwise it is dequantized."""
    return matrix.outputs >= SMALLEST


def _by_group(
    matrices: Sequence[PackedMatrix],
    product: Callable[[Sequence[PackedMatrix]], tuple[Array, ...]],
) -> tuple[Array, ...]:
    """Multiplies each matrix; a call has matrices of the same order of x and tile size."""
    groups: dict[Any, list[int]] = {}
    for place, matrix in enumerate(matrices):
        key = matrix.per_code, min(matrix.outputs, LARGEST)
        groups.setdefault(key, []).append(place)
    results: dict[int, Array] = {}
    for places in groups.values():
        results |= zip(places, product([matrices[i] for i in places]), strict=True)
    return tuple(results[i] for i in range(len(matrices)))


def _kernel(
    x: Array, matrices: Sequence[PackedMatrix], index: Array | None, interpret: bool
) -> tuple[Array, ...]:
    """Computes the results for the matrices of one group."""
    rows = x.shape[0]
    if fits(matrices[0].inputs):
        operands = [PrologueOperand(x, "full")]
        prepared, _ = prepare_rows(operands, identity, rows, matrices[0], interpret=interpret)
    else:
        x16, factors = round_rows(x)
        prepared = PreparedRows(arrange_inputs(x16, matrices[0]), factors)
    return sum_partials(_matmul_partials(prepared, matrices, index, interpret), False)


def supports_partials(matrices: Sequence[PackedMatrix]) -> bool:
    """Whether `matmul_partials` takes these matrices in one call."""
    orders = {(matrix.per_code, matrix.superblocks, matrix.inputs) for matrix in matrices}
    small = min(matrix.outputs for matrix in matrices) < SMALLEST
    return len(orders) == 1 and not small and fits(matrices[0].inputs)


def matmul_partials(
    x: PreparedRows,
    matrices: Sequence[PackedMatrix],
    *,
    index: Int[Array, 1] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "split rows outputs"], ...]:
    """Computes `matmul` of prepared rows, as split-K partial sums.

    Args:
        matrices: for which x was prepared, and which `supports_partials` accepts.
    """
    return _by_group(matrices, lambda chosen: _matmul_partials(x, chosen, index, interpret))


def _tiling(rows: int, matrices: Sequence[PackedMatrix]) -> Tiling:
    outputs = [matrix.outputs for matrix in matrices]
    bits = max(matrix.bits for matrix in matrices)
    superblocks = matrices[0].superblocks
    return choose_tiling(rows, sum(outputs), superblocks, smallest=min(outputs), bits=bits)


def _matmul_partials(
    x: PreparedRows, matrices: Sequence[PackedMatrix], index: Array | None, interpret: bool
) -> tuple[Array, ...]:
    """Computes partial sums for the matrices of one group."""
    rows = x.x.shape[0]
    if rows > KERNEL_ROWS:
        return _dequantized_matmul(x, matrices, index, interpret)
    tiling = _tiling(rows, matrices)
    which = None if index is None else row_tiles(rows, tiling.rows, index)
    return triton.product(x.x, x.factors, which, matrices, tiling, interpret=interpret)


def _dequantized_matmul(
    x: PreparedRows, matrices: Sequence[PackedMatrix], index: Array | None, interpret: bool
) -> tuple[Array, ...]:
    """Computes a plain matmul with the dequantized matrices, [1, rows, outputs] each."""
    contracted = (((1,), (1,)), ((), ()))
    index = jnp.zeros((1,), jnp.int32) if index is None else index
    weights = dequantize(matrices, index, interpret=interpret)
    flat = x.x.reshape(x.x.shape[0], -1)
    y = lax.dot_general(flat, weights, contracted, preferred_element_type=jnp.float32)
    ends = list(accumulate(matrix.outputs for matrix in matrices))[:-1]
    return tuple((part * x.factors[:, None])[None] for part in jnp.split(y, ends, axis=1))


def matmul_xla(
    x: Array, matrices: Sequence[PackedMatrix], index: Array | None
) -> tuple[Array, ...]:
    """Computes the results in plain XLA, with the chosen matrices dequantized to fp16 in memory."""
    which = jnp.int32(0) if index is None else index[0]
    chosen = [index_stack(m, which) if m.words.ndim > 5 else m for m in matrices]
    return tuple(rounded_matmul(x, matrix.dequantize(jnp.float16)) for matrix in chosen)


def index_stack(matrix: PackedMatrix, index: Array) -> PackedMatrix:
    """Copies one matrix of a stack."""

    def cut(part: Array) -> Array:
        flat = part.reshape(-1, *part.shape[-5:])
        return lax.dynamic_index_in_dim(flat, index, keepdims=False)

    return jax.tree.map(cut, matrix)


def sum_partials(parts: Sequence[Array], gated: bool) -> tuple[Array, ...]:
    """Adds the partial sums [split, rows, outputs], and combines gate and up."""
    return _epilogue([p[0] if p.shape[0] == 1 else jnp.sum(p, axis=0) for p in parts], gated)


def _epilogue(results: Sequence[Array], gated: bool) -> tuple[Array, ...]:
    return (jax.nn.silu(results[0]) * results[1],) if gated else tuple(results)

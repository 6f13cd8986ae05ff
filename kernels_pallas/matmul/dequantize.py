"""Dequantize kernel: packed matrices in full, for matmuls of so many rows that it pays off (GEMM).

Weights are written in the order of a kernel's other operand: the results of
`weight_layout.arrange_inputs` and `prologue.prepare_rows` are multiplied with them as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from kernels_pallas.matmul.triton import numbers_of, operands, weights
from kernels_pallas.matmul.weight_layout import PackedMatrix
from kernels_pallas.pdl import first_program_id
from kernels_pallas.triton_ops import plt

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_OUTPUTS = 16  # per program: four warps, 16 bytes of each word per thread


def dequantize(
    matrices: Sequence[PackedMatrix], index: Int[Array, 1], *, interpret: bool = False
) -> Float[Array, "outputs padded_inputs"]:
    """Matrices of stacks in fp16, stacked vertically, inputs in the order of a kernel's slices.

    Args:
        matrices: which read x in the same order.
    """
    first, parts = matrices[0], [operands(matrix) for matrix in matrices]
    outputs = sum(matrix.outputs for matrix in matrices)
    shape = (outputs, first.superblocks, 16 * first.per_code, 2 * first.columns)
    counts = [-(-matrix.outputs // _OUTPUTS) for matrix in matrices]
    kernel = functools.partial(
        _kernel,
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


def _kernel(
    index_ref: Any,
    *refs: Any,
    matrices: Sequence[PackedMatrix],
    operands: Sequence[int],
    tiles: Sequence[int],
    asm: bool,
) -> None:
    *given, out_ref = refs
    left = iter(given)
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

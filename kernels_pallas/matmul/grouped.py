"""Grouped matmul (MoE): each row is multiplied by its expert's matrix, quantized or plain."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.matmul import triton
from kernels_pallas.matmul.grid import choose_tiling
from kernels_pallas.matmul.quantized import kernel_supports, sum_partials
from kernels_pallas.matmul.round_fp16 import round_rows
from kernels_pallas.matmul.weight_layout import PackedMatrix, arrange_inputs
from kernels_pallas.triton_ops import DEFAULT, Backend, first_program_id, plt

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def expert_tiles(offsets: Int[Array, " experts_1"], rows: int, size: int) -> Int[Array, "3 tiles"]:
    """Returns the expert of each tile of at most `size` rows, its first row and number of rows.

    There are as many tiles as any distribution over experts needs; unused ones have no rows.

    Args:
        offsets: rows offsets[i] .. offsets[i + 1] - 1 are expert i's.
        rows: of all experts.
    """
    sizes = offsets[1:] - offsets[:-1]
    count = sizes.shape[0]
    in_tiles = -(-sizes // size)
    ends = jnp.cumsum(in_tiles, dtype=jnp.int32)
    tile = lax.iota(jnp.int32, min(rows, rows // size + count))
    # Comparisons with all offsets: a search would be a loop of kernels on a GPU.
    expert = jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, count - 1)
    before = (tile - (ends - in_tiles)[expert]) * size
    return jnp.stack(
        [expert, offsets[expert] + before, jnp.clip(sizes[expert] - before, 0, size)]
    ).astype(jnp.int32)


def grouped_quantized_matmul(
    x: Float[Array, "rows inputs"],
    offsets: Int[Array, " experts_1"],
    matrices: Sequence[PackedMatrix],
    *,
    index: Int[Array, 1] | None = None,
    gated: bool = False,
    backend: Backend = DEFAULT,
    interpret: bool = False,
) -> tuple[Float[Array, "rows outputs"], ...]:
    """Multiplies each row by its expert's matrix, transposed, in float32; rounds x as `matmul`.

    Args:
        offsets: int32; rows offsets[i] .. offsets[i + 1] - 1 use matrix i; others are undefined.
        matrices: stacks [*stack, experts] of the same shape.
        index: index of the (flattened) leading stacks.
        gated, interpret: see `matmul`.
        backend: "xla" dequantizes the matrices of all experts to memory.

    Raises:
        ValueError: x and a matrix do not fit together.
    """
    rows, count, outputs = x.shape[0], offsets.shape[0] - 1, matrices[0].outputs
    for matrix in matrices:
        if x.shape[1] != matrix.inputs:
            raise ValueError(f"x has {x.shape[1]} inputs, the experts {matrix.inputs}")
    first = jnp.int32(0) if index is None else index[0] * count
    tiling = choose_tiling(
        -(-rows // count),
        outputs * min(rows, count),
        matrices[0].superblocks,
        smallest=outputs,
        bits=max(matrix.bits for matrix in matrices),
    )
    if backend == "xla" or not all(map(kernel_supports, matrices)):
        return sum_partials([y[None] for y in _grouped_xla(x, offsets, matrices, first)], gated)
    x16, factors = round_rows(x)
    parts = triton.product(
        arrange_inputs(x16, matrices[0]),
        factors,
        expert_tiles(offsets, rows, tiling.rows).at[0].add(first),
        matrices,
        tiling,
        interpret=interpret,
    )
    return sum_partials(parts, gated)


def _grouped_xla(
    x: Array, offsets: Array, matrices: Sequence[PackedMatrix], first: Array
) -> tuple[Array, ...]:
    """Computes it in plain XLA, with the matrices of all experts dequantized to fp16 in memory."""
    x16, factors = round_rows(x)
    results = []
    for matrix in matrices:
        chosen = jax.tree.map(
            lambda part: lax.dynamic_slice_in_dim(
                part.reshape(-1, *part.shape[-5:]), first, offsets.shape[0] - 1
            ),
            matrix,
        )
        y = lax.ragged_dot_general(
            x16,
            chosen.dequantize(jnp.float16),
            offsets[1:] - offsets[:-1],
            lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0]),
            preferred_element_type=jnp.float32,
        )
        results.append(y * factors[:, None])
    return tuple(results)


_LEAST, _MOST_ROWS = 16, 64  # rows of a tile: limits of tensor cores and registers
_OUTPUTS = 64  # of a tile
_BYTES = 128  # read at once from each row of a tile


def takes(matrices: Array, *, transposed: bool = False) -> bool:
    """Whether `grouped_dense_matmul` supports these matrices [experts, outputs, inputs]."""
    _, outputs, inputs = _sizes(matrices, transposed)
    return outputs >= _LEAST and _step(matrices, inputs) >= _LEAST


def grouped_dense_matmul(
    x: Float[Array, "rows inputs"],
    offsets: Int[Array, " experts_1"],
    matrices: Float[Array, "experts outputs inputs"],
    *,
    transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "rows outputs"]:
    """Multiplies each row by its expert's matrix, transposed, in float32.

    Operands have x's type if the matrices have it too, otherwise full float32.

    Args:
        offsets: int32; rows offsets[i] .. offsets[i + 1] - 1 use matrix i; others are undefined.
        matrices: see `takes`.
        transposed: they are [experts, inputs, outputs] instead.
        interpret: runs the kernel without a GPU, slowly.
    """
    rows, (count, outputs, inputs) = x.shape[0], _sizes(matrices, transposed)
    share = -(-rows // count)
    size = min(max(_LEAST, 1 << (share - 1).bit_length()), _MOST_ROWS)
    tile = min(_OUTPUTS, 1 << (outputs.bit_length() - 1))
    which = expert_tiles(offsets, rows, size)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            size=size,
            tile=tile,
            step=_step(matrices, inputs),
            transposed=transposed,
            asm=not interpret,
        ),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), jnp.float32),
        grid=(-(-outputs // tile), which.shape[1]),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="dense_experts",
    )(which, x, matrices)


def _sizes(matrices: Any, transposed: bool) -> tuple[int, int, int]:
    """Returns experts, outputs and inputs."""
    experts, outputs, inputs = matrices.shape
    return (experts, inputs, outputs) if transposed else (experts, outputs, inputs)


def _step(matrices: Array, inputs: int) -> int:
    """Returns the inputs read at once: a power of two that divides all."""
    return int(min(_BYTES // matrices.dtype.itemsize, inputs & -inputs))


def _kernel(
    which_ref: Any,
    x_ref: Any,
    matrices_ref: Any,
    out_ref: Any,
    *,
    size: int,
    tile: int,
    step: int,
    transposed: bool,
    asm: bool,
) -> None:
    number = first_program_id(asm=asm)
    expert, row, present = (which_ref[i, pl.program_id(1)] for i in range(3))
    _, outputs, inputs = _sizes(matrices_ref, transposed)
    # The last tile begins earlier if outputs do not divide.
    start = jnp.minimum(number * tile, outputs - tile)
    same = x_ref.dtype == matrices_ref.dtype

    @pl.when(present > 0)
    def compute() -> None:
        rows, columns = pl.ds(row, size), pl.ds(start, tile)
        there = lax.iota(jnp.int32, size) < present
        read = jnp.broadcast_to(there[:, None], (size, step))

        def add(i: Array, total: Array) -> Array:
            part = pl.ds(i * step, step)
            # Masked rows cost no memory traffic.
            left = plt.load(x_ref.at[rows, part], mask=read, other=np.zeros((), x_ref.dtype))
            read_at = (part, columns) if transposed else (columns, part)
            right = plt.load(matrices_ref.at[expert, *read_at])
            if not same:
                left, right = left.astype(jnp.float32), right.astype(jnp.float32)
            exact = False if left.dtype == jnp.float32 else None
            return total + plt.dot(left, right, trans_b=not transposed, allow_tf32=exact)

        total = lax.fori_loop(0, inputs // step, add, jnp.zeros((size, tile), jnp.float32))
        written = jnp.broadcast_to(there[:, None], total.shape)
        plt.store(out_ref.at[rows, columns], total, mask=written)

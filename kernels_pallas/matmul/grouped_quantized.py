"""Grouped matmul (MoE) with quantized matrices: rows sorted by expert times their expert's matrix.

Rows are split into tiles of one expert each; a program reads the matrix of its tile, so only
experts that have rows are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.matmul import mosaic
from kernels_pallas.matmul.grid import choose_tiling
from kernels_pallas.matmul.quantized import backend_product, kernel_supports, sum_partials
from kernels_pallas.matmul.round_fp16 import round_rows
from kernels_pallas.matmul.weight_layout import PackedMatrix, arrange_inputs
from kernels_pallas.triton_ops import DEFAULT, Backend

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def expert_tiles(offsets: Int[Array, " experts_1"], rows: int, size: int) -> Int[Array, "3 tiles"]:
    """The expert of each tile of at most `size` rows, its first row, and its number of rows.

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
    # Compared with all: a search would be a loop of kernels on a GPU.
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
    """Each row times the transpose of its expert's matrix, in float32; x is rounded as by `matmul`.

    Args:
        offsets: int32; rows offsets[i] .. offsets[i + 1] - 1 use matrix i; others are undefined.
        matrices: stacks [*stack, experts] of the same shape.
        index: which of the (flattened) leading stacks.
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
    if backend == "mosaic":
        tiling = mosaic.fit_tiling(tiling, -(-rows // count), matrices)
    if backend == "xla" or not all(kernel_supports(backend, each) for each in matrices):
        return sum_partials([y[None] for y in _grouped_xla(x, offsets, matrices, first)], gated)
    x16, factors = round_rows(x)
    parts = backend_product(backend)(
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
    """In plain XLA, with the matrices of all experts dequantized to fp16 in memory."""
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

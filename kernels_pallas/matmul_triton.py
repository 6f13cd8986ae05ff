"""Products with packed matrices as Triton-style Pallas kernels.

One program takes a tile of a matrix's rows and a tile of x's rows, decodes the weights superblock
by superblock in registers and feeds them to the tensor cores from there. Even one row of x goes
through the tensor cores: unpacking alone costs about as many instructions as plain multiply-adds
would add.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas import registers
from kernels_pallas.layout import Packed
from kernels_pallas.tiling import Tiling
from kernels_pallas.triton_style import plt


def product(
    x: Array,
    factors: Array,
    which: Array,
    matrices: Sequence[Packed],
    tiling: Tiling,
    *,
    gated: bool = False,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """x times the transpose of each matrix, in parts to be added.

    Args:
        x: float16 [rows, superblocks, 16 p, 2 G] in a kernel's order.
        factors: float32 [rows]: what each row of the result is multiplied by.
        which: int32 [3, tiles]: the matrix of its stack that each tile of rows is for, the first of
            its rows, and how many there are; only these are read and written.
        matrices: stacks that share x; each has at least `tiling.outputs` outputs.
        gated: two matrices, gate and up; the result is silu(x gate) * (x up); needs split = 1.

    Returns:
        float32 [split, rows, outputs] of each matrix, or the one result of a gated pair.
    """
    rows = x.shape[0]
    lead = matrices[:1] if gated else matrices
    tiles = [-(-matrix.outputs // tiling.outputs) for matrix in lead]
    shapes = [jax.ShapeDtypeStruct((tiling.split, rows, m.outputs), jnp.float32) for m in lead]
    kernel = functools.partial(
        _kernel, matrices=matrices, tiles=tiles, tiling=tiling, gated=gated, asm=not interpret
    )
    parts = [part for m in matrices for part in (m.half_words(), m.numbers())]
    return tuple(
        pl.pallas_call(
            kernel,
            out_shape=shapes,
            grid=(sum(tiles), which.shape[1], tiling.split),
            compiler_params=plt.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
            interpret=interpret,
            name="packed_product",
        )(which, factors, x, *parts)
    )


def _kernel(
    which_ref: Any,
    factors_ref: Any,
    x_ref: Any,
    *refs: Any,
    matrices: Sequence[Packed],
    tiles: Sequence[int],
    tiling: Tiling,
    gated: bool,
    asm: bool,
) -> None:
    parts, outs = refs[: 2 * len(matrices)], refs[2 * len(matrices) :]
    tile, part = pl.program_id(0), pl.program_id(2)
    index, row, present = (which_ref[i, pl.program_id(1)] for i in range(3))
    rows, there = pl.ds(row, tiling.rows), lax.iota(jnp.int32, tiling.rows) < present
    begin = 0
    for number, count in enumerate(tiles):
        chosen = list(range(len(matrices))) if gated else [number]
        first = matrices[number].outputs - tiling.outputs

        def compute(
            number: int = number, chosen: list[int] = chosen, begin: int = begin, first: int = first
        ) -> None:
            # The last tile of a matrix begins earlier where outputs do not divide.
            start = jnp.minimum((tile - begin) * tiling.outputs, first)
            sums = _accumulate(
                x_ref,
                [(matrices[i], parts[2 * i], parts[2 * i + 1]) for i in chosen],
                (index, pl.ds(start, tiling.outputs), rows, present, part),
                tiling,
                asm,
            )
            factors = plt.load(factors_ref.at[rows], mask=there, other=np.float32(0))[None, :]
            results = [total * factors for total in sums]
            result = _silu(results[0]) * results[1] if gated else results[0]
            to = outs[number].at[part, rows, pl.ds(start, tiling.outputs)]
            plt.store(to, result.T, mask=jnp.broadcast_to(there[:, None], result.T.shape))

        here = present > 0
        if len(tiles) > 1:
            here &= (tile >= begin) & (tile < begin + count)
        pl.when(here)(compute)
        begin += count


def _accumulate(
    x_ref: Any,
    matrices: Sequence[tuple[Packed, Any, Any]],
    where: tuple[Array, Any, Any, Array, Array],
    tiling: Tiling,
    asm: bool,
) -> tuple[Array, ...]:
    """Sums [outputs, rows] of a tile, of each matrix, over a part of the superblocks."""
    index, outputs, rows, present, part = where
    superblocks = matrices[0][0].superblocks
    each = -(-superblocks // tiling.split)
    p, width = matrices[0][0].per_code, 2 * matrices[0][0].columns
    # Rows that are not there cost no traffic; x would otherwise be read as often as the weights.
    there = lax.broadcasted_iota(jnp.int32, (tiling.rows, width), 0) < present

    def step(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        superblock = part * each + i
        totals = []
        for total, (packed, words_ref, numbers_ref) in zip(sums, matrices, strict=True):
            words = [words_ref[index, outputs, superblock, t, :] for t in range(packed.bits)]
            numbers = [
                registers.prepare(
                    _tile(numbers_ref, (index, outputs, superblock), packed, half),
                    packed.levels,
                    packed.symmetric,
                    half,
                    asm=asm,
                )
                for half in range(p)
            ]
            for s, e, f in registers.fractions(words, packed.bits, asm=asm):
                for half, w in enumerate(registers.weights(f, numbers, packed.levels, asm=asm)):
                    at = x_ref.at[rows, superblock, jnp.int32(16 * half + 2 * s + e), :]
                    piece = plt.load(at, mask=there, other=np.float16(0))
                    total = total + plt.dot(w, piece, trans_b=True)
            totals.append(total)
        return tuple(totals)

    zeros = jnp.zeros((tiling.outputs, tiling.rows), jnp.float32)
    if superblocks % tiling.split == 0:
        count: Any = each
    else:
        count = jnp.clip(superblocks - part * each, 0, each)
    return tuple(lax.fori_loop(0, count, step, tuple(zeros for _ in matrices)))


def _tile(ref: Any, where: tuple[Array, Any, Array], packed: Packed, half: int) -> Array:
    """The numbers of each column's block, [outputs, 2 G]: scale and base, or the scale twice.

    Broadcast rather than gathered: Triton then loads them ahead with the words.
    """
    index, outputs, superblock = where
    width = 2 * packed.columns
    numbers = 1 if packed.symmetric else 2
    blocks = packed.columns * 32 // packed.block
    tile = ref[index, outputs, superblock, pl.ds(half * blocks * numbers, blocks * numbers)]
    if tile.shape[1] == width:
        return tile
    shape = (outputs.size, blocks, width // blocks // numbers, numbers)
    tile = lax.broadcast_in_dim(tile.reshape(outputs.size, blocks, numbers), shape, (0, 1, 3))
    return tile.reshape(outputs.size, width)


def _silu(x: Array) -> Array:
    return x / (1 + jnp.exp(-x))

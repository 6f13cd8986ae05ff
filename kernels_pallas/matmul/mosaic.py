"""Quantized matmul kernel, Mosaic GPU back end, on the Triton-style back end's weight layout.

A program copies superblock after superblock of 64 rows of a matrix into shared memory, with block
numbers and x, dequantizes in registers and feeds the tensor cores (WGMMA) from there. If a block is
a column and has a base, its numbers are stored as registers take them; otherwise XLA repeats them
before the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas import mosaic_common
from kernels_pallas.matmul import unpack
from kernels_pallas.matmul.grid import Tiling, row_tiles
from kernels_pallas.matmul.weight_layout import PackedMatrix
from kernels_pallas.mosaic_common import plgpu
from kernels_pallas.ptx import mosaic_assembler

OUTPUTS = mosaic_common.ROWS  # of a tile
MOST_ROWS = 128  # above, dequantizing once and a plain matmul are cheaper
_LEAST_ROWS, _TILE_ROWS = 8, 32  # of x in a tile
_MANY_BITS = 6  # of a code
_ALIGNED = 8  # outputs: rows of a shared-memory tile that are adjacent


def takes(matrix: PackedMatrix) -> bool:
    """Whether the kernel supports the matrix."""
    plain = matrix.steps is None and matrix.codebook is None
    return plain and matrix.outputs >= OUTPUTS and matrix.outputs % _ALIGNED == 0


def fit_tiling(tiling: Tiling, rows: int, matrices: Sequence[PackedMatrix]) -> Tiling:
    """Adapts the tiling to this kernel's tiles.

    Args:
        rows: rows of x per matrix.
        matrices: two superblocks of wide codes leave shared memory for fewer rows.
    """
    wide = max(matrix.bits for matrix in matrices) >= _MANY_BITS
    size = min(tiling.rows, _TILE_ROWS // 2 if wide else _TILE_ROWS)
    return replace(tiling, outputs=OUTPUTS, rows=_LEAST_ROWS if rows <= _LEAST_ROWS else size)


def product(
    x: Array,
    factors: Array,
    which: Array | None,
    matrices: Sequence[PackedMatrix],
    tiling: Tiling,
    *,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """See `triton.product`."""
    rows = x.shape[0]
    which = row_tiles(rows, tiling.rows, jnp.int32(0)) if which is None else which
    first, present = which[1], which[2]
    place = jnp.arange(rows, dtype=jnp.int32)[:, None]
    mine = (place >= first[None]) & (place < (first + present)[None])
    tile = jnp.argmax(mine, axis=1)  # of each row
    source = first[:, None] + jnp.arange(tiling.rows, dtype=jnp.int32)[None]
    tiles = x.reshape(rows, -1)[jnp.minimum(source, rows - 1)]
    results = []
    for matrix in matrices:
        parts = _one(tiles, which, matrix, tiling, interpret)  # [tiles, split, outputs, rows]
        y = parts[tile, :, :, place[:, 0] - first[tile]]
        results.append(y.swapaxes(0, 1) * factors[None, :, None])
    return tuple(results)


def _one(x: Array, which: Array, packed: PackedMatrix, tiling: Tiling, interpret: bool) -> Array:
    """Multiplies each tile of x [tiles, rows, inputs]."""
    tiles, rows, _ = x.shape
    numbers, of_tiles = _numbers(packed, which[0])
    where = jnp.concatenate([which[:1], which[2:]])
    words = packed.half_words()
    words = words.reshape(*words.shape[:2], -1)
    out = jax.ShapeDtypeStruct((tiles, tiling.split, packed.outputs, rows), jnp.float32)
    kernel = functools.partial(
        _kernel, packed=packed, tiling=tiling, of_tiles=of_tiles, interpret=interpret
    )
    grid = {"outputs": -(-packed.outputs // OUTPUTS), "tile": tiles, "part": tiling.split}
    call = mosaic_common.mosaic_call(
        kernel, "mosaic_packed_product", out, grid, interpret=interpret
    )
    return jnp.asarray(call(where, x, words, numbers))


def _numbers(packed: PackedMatrix, index: Array) -> tuple[Array, bool]:
    """Returns each column's scale and base, or scale twice, [matrices, outputs, superblocks * 64].

    Also returns whether matrices are one per tile instead of the stack's.
    """
    (numbers,) = packed.numbers()
    each = packed.block // 32 * (2 if packed.symmetric else 1)
    if each == 1:
        return numbers.reshape(*numbers.shape[:2], -1), False
    of_tiles = index.shape[0] < numbers.shape[0]
    if of_tiles:
        numbers = numbers[index]
    pairs = 1 if packed.symmetric else 2
    shape = (*numbers.shape[:3], -1, pairs)
    repeated = jnp.repeat(numbers.reshape(shape), each, axis=3)
    return repeated.reshape(*numbers.shape[:2], -1), of_tiles


def _kernel(
    which_ref: Any,
    x_ref: Any,
    words_ref: Any,
    numbers_ref: Any,
    out_ref: Any,
    *,
    packed: PackedMatrix,
    tiling: Tiling,
    of_tiles: bool,
    interpret: bool,
) -> None:
    width, rows = 2 * packed.columns, x_ref.shape[1]
    order = mosaic_common.shared_memory_transforms(width, 16)
    # Buffers of a superblock: words, numbers and x.
    columns = (packed.bits * width, packed.per_code * width, x_ref.shape[2] // packed.superblocks)
    sizes = (OUTPUTS, OUTPUTS, rows)
    bytes_of = sum(2 * size * count for size, count in zip(sizes, columns, strict=True))
    stages = max(mosaic_common.pipeline_stages(bytes_of, 4096), 2)
    run = functools.partial(
        _run,
        refs=(words_ref, numbers_ref, x_ref),
        which_ref=which_ref,
        out_ref=out_ref,
        packed=packed,
        tiling=tiling,
        of_tiles=of_tiles,
    )
    tiles = [
        plgpu.SMEM((stages, size, count), kind, transforms=order)
        for size, count, kind in zip(
            sizes, columns, (jnp.uint16, jnp.float16, jnp.float16), strict=True
        )
    ]
    # Interpret mode takes both matmul operands from shared memory only.
    staged = [plgpu.SMEM((OUTPUTS, width), jnp.float16, transforms=order)] if interpret else []
    pl.run_scoped(
        lambda *shared: pl.run_scoped(
            functools.partial(run, *shared), plgpu.ACC((OUTPUTS, rows), jnp.float32)
        ),
        tiles,
        plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        staged,
    )


def _run(
    tiles: Sequence[Any],
    filled: Any,
    staged: Sequence[Any],
    total_ref: Any,
    *,
    refs: Sequence[Any],
    which_ref: Any,
    out_ref: Any,
    packed: PackedMatrix,
    tiling: Tiling,
    of_tiles: bool,
) -> None:
    """Runs one program, with its shared memory."""
    tile, part = lax.axis_index("tile"), lax.axis_index("part")
    index, present = which_ref[0, tile], which_ref[1, tile]
    # The last tile of a matrix begins earlier if outputs do not divide.
    start = jnp.minimum(lax.axis_index("outputs") * OUTPUTS, packed.outputs - OUTPUTS)
    outputs = pl.ds(pl.multiple_of(start, _ALIGNED), OUTPUTS)
    each, stages = -(-packed.superblocks // tiling.split), tiles[0].shape[0]
    steps = jnp.clip(packed.superblocks - part * each, 0, each)
    steps = jnp.where(present > 0, steps, 0)
    words_ref, numbers_ref, x_ref = refs
    sources = (
        words_ref.at[index, outputs],
        numbers_ref.at[tile if of_tiles else index, outputs],
        x_ref.at[tile],
    )

    def copy(i: Array) -> None:
        @pl.when(i < steps)
        def start() -> None:
            slot = lax.rem(i, stages)
            for source, to in zip(sources, tiles, strict=True):
                size = to.shape[2]
                at = pl.multiple_of((part * each + i) * size, size)
                plgpu.copy_gmem_to_smem(source.at[:, pl.ds(at, size)], to.at[slot], filled.at[slot])

    for i in range(stages):
        copy(jnp.int32(i))

    def step(i: Array, _: None) -> None:
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(filled.at[slot])
        words, numbers, x = (each.at[slot] for each in tiles)
        _multiply(total_ref, words, numbers, x, packed, staged)
        plgpu.wgmma_wait(0)
        plgpu.commit_smem()  # all warps have finished with the superblock
        copy(i + stages)

    lax.fori_loop(0, steps, step, None)

    @pl.when(present > 0)
    def write() -> None:
        out_ref[tile, part, outputs, :] = total_ref[...]


def _multiply(
    total_ref: Any, words_ref: Any, numbers_ref: Any, x_ref: Any, packed: PackedMatrix, staged: Any
) -> None:
    """Accumulates the matmul with one superblock."""
    width, asm = 2 * packed.columns, not staged

    def slices(ref: Any, count: int) -> list[Array]:
        return [
            plgpu.layout_cast(ref[:, pl.ds(t * width, width)], plgpu.Layout.WGMMA)
            for t in range(count)
        ]

    with mosaic_assembler():
        numbers = [
            unpack.prepare_scales(tile, packed.levels, packed.symmetric, half, asm=asm)
            for half, tile in enumerate(slices(numbers_ref, packed.per_code))
        ]
        words = slices(words_ref, packed.bits)
        for s, e, f in unpack.fractions(words, packed.bits, asm=asm):
            for half, w in enumerate(unpack.weights(f, numbers, packed.levels, asm=asm)):
                at = (16 * half + 2 * s + e) * width
                for stage in staged:
                    stage[...] = w
                    plgpu.commit_smem()
                factor = staged[0] if staged else w
                x = x_ref.at[:, pl.ds(at, width)].transpose((1, 0))
                plgpu.wgmma(total_ref, factor, x)
                plgpu.wgmma_wait(0 if staged else 1)  # the previous matmul has read its registers

"""Quantized matmul kernel (GEMV and GEMM), Triton-style back end.

A program takes a tile of a matrix's rows and a tile of x's rows, dequantizes the weights superblock
by superblock in registers and feeds the tensor cores from there. Even a single row of x (GEMV) uses
the tensor cores: unpacking alone costs about as many instructions as plain multiply-adds would add.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.matmul import codebook, unpack
from kernels_pallas.matmul.grid import Tiling
from kernels_pallas.matmul.weight_layout import CODES, PackedMatrix
from kernels_pallas.pdl import first_program_id
from kernels_pallas.triton_ops import plt


def product(
    x: Array,
    factors: Array,
    which: Array | None,
    matrices: Sequence[PackedMatrix],
    tiling: Tiling,
    *,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """x times the transpose of each matrix, as split-K partial sums.

    Args:
        x: float16 [rows, superblocks, 16 p, 2 G] in a kernel's order.
        factors: float32 [rows]: what each row of the result is multiplied by; or [rows,
            superblocks]: what each superblock's share of it is.
        which: int32 [3, tiles]: for each tile of rows the matrix of its stack, its first row, and
            its number of rows; only these are read and written. None: all rows use the only matrix
            of each stack; no load then waits for this one.
        matrices: stacks that share x; each has at least `tiling.outputs` outputs.

    Returns:
        float32 [split, rows, outputs] of each matrix.
    """
    rows = x.shape[0]
    tiles = [-(-matrix.outputs // tiling.outputs) for matrix in matrices]
    shapes = [jax.ShapeDtypeStruct((tiling.split, rows, m.outputs), jnp.float32) for m in matrices]
    parts = [operands(matrix) for matrix in matrices]
    row_tiles = -(-rows // tiling.rows) if which is None else which.shape[1]
    kernel = functools.partial(
        _kernel,
        matrices=matrices,
        counts=[len(part) for part in parts],
        tiles=tiles,
        tiling=tiling,
        asm=not interpret,
    )
    return tuple(
        pl.pallas_call(
            kernel,
            out_shape=shapes,
            grid=(sum(tiles), row_tiles, tiling.split),
            compiler_params=plt.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
            interpret=interpret,
            name="packed_product",
        )(which, factors, x, *chain.from_iterable(parts))
    )


def operands(matrix: PackedMatrix) -> list[Array]:
    """The arrays of a matrix: words, block numbers, and the table of a codebook."""
    tables = [] if matrix.codebook is None else [jnp.asarray(codebook.table(matrix.codebook))]
    return [matrix.half_words(), *matrix.numbers(), *tables]


def _kernel(
    which_ref: Any,
    factors_ref: Any,
    x_ref: Any,
    *refs: Any,
    matrices: Sequence[PackedMatrix],
    counts: Sequence[int],
    tiles: Sequence[int],
    tiling: Tiling,
    asm: bool,
) -> None:
    given = iter(refs)
    parts = [tuple(islice(given, count)) for count in counts]
    outs = tuple(given)
    tile, part = first_program_id(asm=asm), pl.program_id(2)
    if which_ref is None:
        index, row = jnp.int32(0), pl.program_id(1) * tiling.rows
        present = jnp.minimum(x_ref.shape[0] - row, tiling.rows)
    else:
        index, row, present = (which_ref[i, pl.program_id(1)] for i in range(3))
    rows, there = pl.ds(row, tiling.rows), lax.iota(jnp.int32, tiling.rows) < present
    begin = 0
    for number, count in enumerate(tiles):
        first = matrices[number].outputs - tiling.outputs

        def compute(number: int = number, begin: int = begin, first: int = first) -> None:
            # The last tile of a matrix begins earlier if outputs do not divide.
            start = jnp.minimum((tile - begin) * tiling.outputs, first)
            where = (index, pl.ds(start, tiling.outputs), rows, present, part)
            of_row = len(factors_ref.shape) == 1
            inside = None if of_row else factors_ref
            total = _accumulate(x_ref, matrices[number], parts[number], where, tiling, asm, inside)
            if of_row:
                factors = plt.load(factors_ref.at[rows], mask=there, other=np.float32(0))
                total *= factors[None, :]
            result = total.T
            to = outs[number].at[part, rows, pl.ds(start, tiling.outputs)]
            plt.store(to, result, mask=jnp.broadcast_to(there[:, None], result.shape))

        here = present > 0
        if len(tiles) > 1:
            here &= (tile >= begin) & (tile < begin + count)
        pl.when(here)(compute)
        begin += count


def _accumulate(
    x_ref: Any,
    packed: PackedMatrix,
    refs: Sequence[Any],
    where: tuple[Array, Any, Any, Array, Array],
    tiling: Tiling,
    asm: bool,
    factors_ref: Any,
) -> Array:
    """The sum [outputs, rows] of a tile, over a part of the superblocks.

    Args:
        factors_ref: float32 [rows, superblocks]: what each superblock's share is multiplied by;
            None: the sum is not scaled here.
    """
    index, outputs, rows, present, part = where
    words_ref, *number_refs = refs
    superblocks = packed.superblocks
    each = -(-superblocks // tiling.split)
    none = (jnp.zeros((tiling.outputs, tiling.rows), jnp.float32),) * tiling.chains
    # Masked rows cost no traffic; x would otherwise be read as often as the weights.
    there = lax.broadcasted_iota(jnp.int32, (tiling.rows, 2 * packed.columns), 0) < present

    def step(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        superblock = part * each + i
        chains = list(sums if factors_ref is None else none)
        words = [words_ref[index, outputs, superblock, t, :] for t in range(packed.bits)]
        numbers = numbers_of(packed, number_refs, (index, outputs, superblock), asm)
        slices = weights(packed, words, numbers, number_refs[-1], asm)
        for turn, (number, w) in enumerate(slices):
            at = x_ref.at[rows, superblock, jnp.int32(number), :]
            piece = plt.load(at, mask=there, other=np.float16(0))
            chains[turn % tiling.chains] += plt.dot(w, piece, trans_b=True)
        if factors_ref is None:
            return tuple(chains)
        real = lax.iota(jnp.int32, tiling.rows) < present
        at = factors_ref.at[rows, superblock]
        factors = plt.load(at, mask=real, other=np.float32(0))
        return (sums[0] + functools.reduce(jnp.add, chains) * factors[None, :],)

    if superblocks % tiling.split == 0:
        count: Any = each
    else:
        count = jnp.clip(superblocks - part * each, 0, each)
    sums = lax.fori_loop(0, count, step, none if factors_ref is None else none[:1])
    return functools.reduce(jnp.add, sums)


def weights(
    packed: PackedMatrix,
    words: Sequence[Array],
    numbers: Sequence[unpack.ScaleAndBase],
    table_ref: Any,
    asm: bool,
) -> Iterator[tuple[int, Array]]:
    """The weights of each slice of a superblock, and its position in x."""
    if packed.codebook is not None:
        table = codebook.tiles(table_ref, words[0].shape) if asm else []
        for s, e, value in codebook.look_up(words, packed.codebook, table, asm=asm):
            of_block = numbers[s * packed.parts // CODES]
            yield 2 * s + e, unpack.multiply(value, of_block.times, asm=asm)
        return
    for s, e, f in unpack.fractions(words, packed.bits, asm=asm):
        part = s * packed.parts // CODES
        known = numbers[part : part + packed.per_code]
        for half, w in enumerate(unpack.weights(f, known, packed.levels, asm=asm)):
            yield 16 * half + 2 * s + e, w


def numbers_of(
    packed: PackedMatrix, refs: Sequence[Any], where: tuple[Array, Any, Array], asm: bool
) -> list[unpack.ScaleAndBase]:
    """Scales and bases for `unpack.weights`, by half of a superblock or by block of a column."""
    # A codebook's values are multiplied by the scale as whole codes are.
    levels = packed.levels if packed.codebook is None else 256
    kind = levels, packed.symmetric
    count, width = 1 if packed.symmetric else 2, 2 * packed.columns
    if packed.steps is None:
        each = 32 * packed.columns // packed.block * count
        tiles = [
            _tile(refs[0], where, (half * each, each), count, width)
            for half in range(packed.per_code)
        ]
        return [unpack.prepare_scales(tile, *kind, n, asm=asm) for n, tile in enumerate(tiles)]
    integers, steps = (
        _tile(ref, where, (0, ref.shape[-1]), c, width)
        for ref, c in zip(refs[:2], (1, count), strict=True)
    )
    return [
        unpack.prepare_two_level_scales(integers, steps, *kind, part, asm=asm)
        for part in range(packed.parts)
    ]


def _tile(
    ref: Any, where: tuple[Array, Any, Array], part: tuple[int, int], numbers: int, width: int
) -> Array:
    """Numbers of each column's block, [outputs, width]: several in turn, or one twice.

    Broadcast rather than gathered: Triton then prefetches them with the words.

    Args:
        part: the first of a superblock's, and how many.
        numbers: per block, which are adjacent.
    """
    index, outputs, superblock = where
    tile = ref[index, outputs, superblock, pl.ds(*part)]
    if tile.dtype == jnp.uint8:
        tile = tile.astype(jnp.uint16)
    if tile.shape[1] == width:
        return tile
    blocks = part[1] // numbers
    shape = (outputs.size, blocks, width // part[1], numbers)
    tile = lax.broadcast_in_dim(tile.reshape(outputs.size, blocks, numbers), shape, (0, 1, 3))
    return tile.reshape(outputs.size, width)

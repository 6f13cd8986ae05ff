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

from kernels_pallas.matmul import unpack
from kernels_pallas.matmul.grid import Tiling
from kernels_pallas.matmul.unpack import byte_of, fma_by, ptx
from kernels_pallas.matmul.weight_layout import CODES, PackedMatrix
from kernels_pallas.triton_ops import first_program_id, plt

_TIMES = 4  # of each register in a table


def table(values: Sequence[int]) -> np.ndarray:
    """Returns four registers with the bytes of 16 values, and one with the filler bytes: uint16.

    Each is stored four times, so that every thread holding columns reads another address: a value
    read by all threads would be kept in uniform registers, which `prmt` does not support.
    """
    found, upper = _bytes(values)
    filler = np.full(4, 0 if upper else 0x64, np.uint8)
    registers = np.concatenate([found, filler]).view("<u4")
    return registers.repeat(_TIMES).view("<u2")


def tiles(ref: Any, shape: tuple[int, ...]) -> list[Array]:
    """Loads the registers of `table`, each as a tile of this shape."""
    size = 2 * _TIMES
    spread = (shape[0], shape[1] // size, size)
    return [
        lax.broadcast_in_dim(ref[pl.ds(size * n, size)], spread, (2,)).reshape(shape)
        for n in range(ref.shape[0] // size)
    ]


def look_up(
    words: Sequence[Array], values: Sequence[int], registers: Sequence[Array], *, asm: bool
) -> Iterator[tuple[int, int, Array]]:
    """Yields (s, e, the codes' values in fp16) for the 16 slices of a superblock.

    Args:
        words: uint16 [rows, 2 G] for each of 4 words.
        values: of the codes, in -128..127.
        registers: from `tiles`, if `asm` is true.
    """
    found, upper = _bytes(values)
    for byte, word in enumerate(words):
        pairs = (
            _both(word, registers)
            if asm
            else [_one(word >> np.uint16(8 * e), found) for e in (0, 1)]
        )
        for e in range(2):
            for high in range(2):
                yield byte + 4 * high, e, _value(pairs[e], high, upper, registers, asm)


def _bytes(values: Sequence[int]) -> tuple[np.ndarray, bool]:
    """Returns uint8 [16] for the values, and whether they are upper bytes of fp16."""
    halves = np.asarray(values, np.float16).view(np.uint16)
    if not np.any(halves & 0xFF):
        return (halves >> 8).astype(np.uint8), True
    return np.asarray([value + 128 for value in values], np.uint8), False


def _both(word: Array, registers: Sequence[Array]) -> list[Array]:
    """Returns the values of the codes in the low bytes of half-words, then in the high bytes.

    Bytes 0 and 2 are put before 1 and 3: `prmt` reads the lowest four indices of a register, which
    then belong to the same byte of both half-words.
    """
    order = ".reg .b32 t; prmt.b32 t, $1, $1, 0x3120;"
    which = ptx(order + "and.b32 $0, t, 0x77777777;", [word])
    side = "shr.b32 t, t, 1; lop3.b32 $0, t, 0x44444444, 0x32103210, 0xEA;"
    sides = ptx(order + side, [word])
    look = "prmt.b32 x, $3, $4, w; prmt.b32 y, $5, $6, w; prmt.b32 $0, x, y, s;"
    return [
        ptx(
            f".reg .b32 w, s, x, y; shr.b32 w, $1, {16 * e}; shr.b32 s, $2, {16 * e};" + look,
            [which, sides, *registers[:4]],
        )
        for e in range(2)
    ]


def _one(codes: Array, found: np.ndarray) -> Array:
    """Returns the values of the codes in the low byte of each half-word."""
    low, high = (_chosen(codes >> np.uint16(shift), found) for shift in (0, 4))
    return low | high << np.uint16(8)


def _chosen(codes: Array, found: np.ndarray) -> Array:
    """Looks up by a tree of selects, one for each of the four lowest bits."""
    left: list[Any] = [np.uint16(byte) for byte in found]
    for bit in range(4):
        odd = (codes >> np.uint16(bit)) & np.uint16(1) != np.uint16(0)
        pairs = zip(left[::2], left[1::2], strict=True)
        left = [jnp.where(odd, second, first) for first, second in pairs]
    return left[0]


def _value(pair: Array, high: int, upper: bool, registers: Sequence[Array], asm: bool) -> Array:
    """Returns the value of the low or high byte of each half-word."""
    if asm:
        selector = (0x3414 if high else 0x2404) if upper else (0x4341 if high else 0x4240)
        found = ptx(f"prmt.b32 $0, $1, $2, {selector:#x};", [pair, registers[4]])
    elif upper:
        byte = pair & np.uint16(0xFF00) if high else pair << np.uint16(8)
        found = lax.bitcast_convert_type(byte, jnp.float16)
    else:
        found = byte_of(pair, high, asm=asm)
    return found if upper else fma_by(found, 1.0, -1152.0, asm=asm)


def product(
    x: Array,
    factors: Array,
    which: Array | None,
    matrices: Sequence[PackedMatrix],
    tiling: Tiling,
    *,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Computes x @ matrix.T of each matrix, as split-K partial sums.

    Args:
        x: float16 [rows, superblocks, 16 p, 2 G] in a kernel's order.
        factors: float32 [rows]: factor of each row of the result; or [rows, superblocks]: factor of
            each superblock's share of it.
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
    """Returns the arrays of a matrix: words, block numbers, and the table of a codebook."""
    tables = [] if matrix.codebook is None else [jnp.asarray(table(matrix.codebook))]
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
    ref_iterator = iter(refs)
    parts = [tuple(islice(ref_iterator, count)) for count in counts]
    outs = tuple(ref_iterator)
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
    """Computes the sum [outputs, rows] of a tile, over a part of the superblocks.

    Args:
        factors_ref: float32 [rows, superblocks]: factor of each superblock's share; None: the sum
            is not scaled here.
    """
    index, outputs, rows, present, part = where
    words_ref, *number_refs = refs
    superblocks = packed.superblocks
    per_part = -(-superblocks // tiling.split)
    none = (jnp.zeros((tiling.outputs, tiling.rows), jnp.float32),) * tiling.chains
    # Masked rows cost no traffic; x would otherwise be read as often as the weights.
    there = lax.broadcasted_iota(jnp.int32, (tiling.rows, 2 * packed.columns), 0) < present

    def step(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        superblock = part * per_part + i
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
        count: Any = per_part
    else:
        count = jnp.clip(superblocks - part * per_part, 0, per_part)
    sums = lax.fori_loop(0, count, step, none if factors_ref is None else none[:1])
    return functools.reduce(jnp.add, sums)


def weights(
    packed: PackedMatrix,
    words: Sequence[Array],
    numbers: Sequence[unpack.ScaleAndBase],
    table_ref: Any,
    asm: bool,
) -> Iterator[tuple[int, Array]]:
    """Yields the weights of each slice of a superblock, and its position in x."""
    if packed.codebook is not None:
        table = tiles(table_ref, words[0].shape) if asm else []
        for s, e, value in look_up(words, packed.codebook, table, asm=asm):
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
    """Returns scales and bases for `unpack.weights`, by superblock half or by column block."""
    # A codebook's values are multiplied by the scale as whole codes are.
    levels = packed.levels if packed.codebook is None else 256
    kind = levels, packed.symmetric
    count, width = 1 if packed.symmetric else 2, 2 * packed.columns
    if packed.steps is None:
        per_half = 32 * packed.columns // packed.block * count
        tiles = [
            _tile(refs[0], where, (half * per_half, per_half), count, width)
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
    """Loads the numbers of each column's block, [outputs, width]: several in turn, or one twice.

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

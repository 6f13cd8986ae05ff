"""Matmul grid: tile sizes and split-K of quantized matmul kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Int

MULTIPROCESSORS = 132  # of an H100 or H200
SMALLEST = 16  # outputs of a tile
LARGEST = 128
_LEAST_ROWS = 8  # rows of x in a tile: the minimum of tensor cores
SMALL_ROWS = 16  # up to this, a tile has few outputs
_FEW_ROWS = 32  # up to this, superblocks are prefetched
_SHARED_MEMORY = 227 << 10  # bytes per multiprocessor available to programs


@dataclass(frozen=True)
class Tiling:
    """Tiling: a program computes [rows, outputs] of y over a part of the inputs.

    Attributes:
        outputs: rows of the matrix in a tile; a power of two, at least 16.
        rows: rows of x in a tile; a power of two, at least 8.
        split: split-K: parts of the inputs, each summed by a program of its own.
        warps: of a program.
        stages: pipeline stages of the loop over superblocks; more than one prefetches into shared
            memory.
        chains: independent accumulators of a tile, to hide the latency of small tensor-core
            operations.
    """

    outputs: int
    rows: int
    split: int
    warps: int = 4
    stages: int = 2
    chains: int = 1


def choose_tiling(rows: int, outputs: int, superblocks: int, *, smallest: int, bits: int) -> Tiling:
    """Chooses the tiling for x [rows, inputs], tuned on an H200.

    Up to 16 rows two warps compute 32 outputs: several programs fit on a multiprocessor and hide
    each other's latencies; while all programs of a call fit, more is prefetched. Up to 32 rows 64
    outputs, the least of a warp group. Many rows: tiles as large as registers allow, because every
    tile of rows dequantizes the weights again; x then takes the shared memory, and nothing is
    prefetched.

    Args:
        outputs: of all matrices together.
        smallest: outputs of the smallest matrix.
        bits: of the widest code; many words leave registers for fewer rows.
    """
    tile_rows = min(128 if bits < 6 else 64, max(_LEAST_ROWS, 1 << (rows - 1).bit_length()))
    small, few = tile_rows <= SMALL_ROWS, tile_rows <= _FEW_ROWS
    widest = 32 if small else 64 if few else LARGEST
    tile = min(widest, 1 << (smallest.bit_length() - 1))
    programs = -(-outputs // tile) * -(-rows // tile_rows)
    min_programs = MULTIPROCESSORS if small else 2 * MULTIPROCESSORS
    split = 1
    while split < superblocks and programs * split < min_programs:
        split *= 2
    split = min(split, superblocks)
    if not small:
        return Tiling(tile, tile_rows, split, 8 if tile == LARGEST else 4, 2 if few else 1)
    # Bytes of a superblock: words, block numbers, and x in fp16; for one less than the stages.
    loaded = tile * 128 * (bits + 1) + 2 * 1024 * tile_rows
    programs_per_sm = _SHARED_MEMORY // (2 * loaded)
    fits = programs * split <= programs_per_sm * MULTIPROCESSORS
    return Tiling(tile, tile_rows, split, tile // 16, 3 if fits else 2, chains=2)


def row_tiles(rows: int, size: int, index: Array) -> Int[Array, "3 tiles"]:
    """Returns each row tile's matrix of the stack, first row, and number of rows."""
    first = jnp.arange(0, rows, size, dtype=jnp.int32)
    present = jnp.minimum(rows - first, size)
    return jnp.stack([jnp.broadcast_to(index, first.shape), first, present])

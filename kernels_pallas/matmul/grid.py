"""How a product is cut into programs."""

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
_LEAST_ROWS = 8  # of x in a tile: what tensor cores take at least
SMALL_ROWS = 16  # for which a tile has few outputs
_FEW_ROWS = 32  # for which superblocks are loaded ahead
_SHARED_MEMORY = 227 << 10  # bytes of a multiprocessor that programs can have


@dataclass(frozen=True)
class Tiling:
    """One program computes [rows, outputs] of y over a part of the inputs.

    Attributes:
        outputs: rows of the matrix in a tile; a power of two, at least 16.
        rows: rows of x in a tile; a power of two, at least 8.
        split: parts of the inputs, each summed by a program of its own.
        warps: of a program.
        stages: of the loop over superblocks; more than one loads ahead into shared memory.
        chains: sums of a tile that are computed beside one another: a small product of tensor cores
            waits longer for the one before it than it takes.
    """

    outputs: int
    rows: int
    split: int
    warps: int = 4
    stages: int = 2
    chains: int = 1


def choose(rows: int, outputs: int, superblocks: int, *, smallest: int, bits: int) -> Tiling:
    """A tiling for x [rows, inputs].

    As measured on an H200. Up to 16 rows two warps have 32 outputs: several programs fit beside one
    another, which hide each other's latencies. As long as all programs of a call fit so, more is
    loaded ahead. Up to 32 rows 64 outputs, a warp group's least. Many rows: tiles as large as
    registers allow, because every tile of rows decodes the weights again; x then takes the shared
    memory, and nothing is loaded ahead.

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
    wanted = MULTIPROCESSORS if small else 2 * MULTIPROCESSORS
    split = 1
    while split < superblocks and programs * split < wanted:
        split *= 2
    split = min(split, superblocks)
    if not small:
        return Tiling(tile, tile_rows, split, 8 if tile == LARGEST else 4, 2 if few else 1)
    # Of a superblock: words, numbers of blocks, and x in fp16. One less than there are stages.
    loaded = tile * 128 * (bits + 1) + 2 * 1024 * tile_rows
    beside = _SHARED_MEMORY // (2 * loaded)
    fits = programs * split <= beside * MULTIPROCESSORS
    return Tiling(tile, tile_rows, split, tile // 16, 3 if fits else 2, chains=2)


def tiles_of_rows(rows: int, size: int, index: Array) -> Int[Array, "3 tiles"]:
    """For all tiles of rows: which matrix of a stack, its first row, and how many there are."""
    first = jnp.arange(0, rows, size, dtype=jnp.int32)
    present = jnp.minimum(rows - first, size)
    return jnp.stack([jnp.broadcast_to(index, first.shape), first, present])

"""How a product is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

MULTIPROCESSORS = 132  # of an H100 or H200
SMALLEST = 16  # outputs of a tile
LARGEST = 128
FEW_ROWS = 32  # of x in a tile, for which superblocks are loaded ahead


@dataclass(frozen=True)
class Tiling:
    """One program computes [rows, outputs] of y over a part of the inputs.

    Attributes:
        outputs: rows of the matrix in a tile; a power of two, at least 16.
        rows: rows of x in a tile; a power of two, at least 16.
        split: parts of the inputs, each summed by a program of its own.
        warps: of a program.
        stages: of the loop over superblocks; more than one loads ahead into shared memory.
    """

    outputs: int
    rows: int
    split: int
    warps: int = 4
    stages: int = 2


def choose(rows: int, outputs: int, superblocks: int, *, smallest: int, bits: int) -> Tiling:
    """A tiling for x [rows, inputs].

    Few rows: tiles of 64 outputs, a warp group's least, and so many programs that every
    multiprocessor has some. Many rows: tiles as large as registers allow, because every tile of
    rows decodes the weights again; x then takes the shared memory, and nothing is loaded ahead.

    Args:
        outputs: of all matrices together.
        smallest: outputs of the smallest matrix.
        bits: of the widest code; many words leave registers for fewer rows.
    """
    tile_rows = min(128 if bits < 6 else 64, max(16, 1 << (rows - 1).bit_length()))
    few = tile_rows <= FEW_ROWS
    tile = min(64 if few else LARGEST, 1 << (smallest.bit_length() - 1))
    programs = -(-outputs // tile) * -(-rows // tile_rows)
    split = 1
    while split < superblocks and programs * split < 2 * MULTIPROCESSORS:
        split *= 2
    split = min(split, superblocks)
    return Tiling(tile, tile_rows, split, 8 if tile == LARGEST else 4, 2 if few else 1)

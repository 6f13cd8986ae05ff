"""Weight layout of quantized matmul kernels, and the matching order of x.

A column is 32 codes of one row in `bits` words of 32 bits; G columns are a superblock. Code 4 s + i
of a column is code s of byte i of its words. So the half-words h of a column's words hold the codes
4 s + 2 h in their low bytes and 4 s + 2 h + 1 in their high bytes. A kernel sees the words of a
superblock as [rows, bits, 2 G] half-words, and unpacks a slice [rows, 2 G] of weights for each of 8
s and 2 bytes e; its other operand is in the order of `arrange_inputs`:

    slice (half, s, e), position 2 g + h
    <->  input 32 (G (p superblock + half) + g) + 4 s + 2 h + e
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

CODES = 8  # codes of a byte strip, which fill `bits` bytes
SUPER = 256  # weights that share a step and a floor
# Block sizes the kernels support; two-level formats only with one weight per code.
BLOCKS: tuple[int, ...] = (32, 64, 128)
TWO_LEVEL_BLOCKS: tuple[int, ...] = (16, 32)


class CodePiece(NamedTuple):
    """A bit field of a code: `(byte >> low) & (2**width - 1)` gives bits `at`.. of the code."""

    byte: int
    low: int
    width: int
    at: int


def _whole(bits: int, count: int) -> list[tuple[CodePiece, ...]]:
    """Places codes within one byte: byte t has code t, and above it code t + bits if it fits."""
    return [(CodePiece(s % bits, bits * (s // bits), bits, 0),) for s in range(count)]


def _parts(*pieces: tuple[int, int, int]) -> tuple[CodePiece, ...]:
    """Splits a code over several bytes: (byte, low, width), from its lowest bit."""
    at, code = 0, []
    for byte, low, width in pieces:
        code.append(CodePiece(byte, low, width, at))
        at += width
    return tuple(code)


# PIECES[bits][code]: bit fields of each of 8 codes in `bits` bytes.
PIECES: dict[int, list[tuple[CodePiece, ...]]] = {
    2: _whole(2, 8),
    3: [*_whole(3, 6), _parts((0, 6, 2), (2, 6, 1)), _parts((1, 6, 2), (2, 7, 1))],
    4: _whole(4, 8),
    5: [
        *_whole(5, 5),
        _parts((0, 5, 3), (1, 5, 2)),
        _parts((2, 5, 3), (3, 5, 2)),
        _parts((4, 5, 3), (1, 7, 1), (3, 7, 1)),
    ],
    6: [
        *_whole(6, 6),
        _parts((0, 6, 2), (1, 6, 2), (2, 6, 2)),
        _parts((3, 6, 2), (4, 6, 2), (5, 6, 2)),
    ],
    7: [*_whole(7, 7), _parts(*((t, 7, 1) for t in range(7)))],
    8: _whole(8, 8),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedMatrix:
    """A quantized matrix [outputs, inputs], or a stack of them: codes and block numbers.

    A weight of code q is scale * q + base, or scale * (q - levels // 2) if blocks have no base, or
    scale * codebook[q]. With 11 levels a code is a pair: 11 * x + y in 7 bits, p = 2 weights; x is
    the weight of half 0 of its superblock, y that of half 1.

    In a two-level format, such as GGUF's K-quants, scale = s * step and base = m * floor, with
    integers s and m per block, step and floor per 256 weights.

    Attributes:
        words: uint32 [*stack, outputs, superblocks, bits, 1, G], G = 32, or 16 if p = 2.
        scales: [*stack, outputs, superblocks, 1, S, numbers], S = 32 * G * p / block: scale and
            base in float16, or s and m in int8.
        levels: values a weight can take: 4, 8, 11, 16, 32, 64 or 256.
        block: weights that share a scale: 32, 64 or 128; 16 or 32 in a two-level format.
        inputs: without the padding of the last superblock.
        steps: float16 [*stack, outputs, superblocks, 1, 4, numbers], step and floor, or None.
        codebook: the 16 values of 4-bit codes, in -128..127, if blocks have no base; None: codes
            are evenly spaced.
    """

    words: Any
    scales: Any
    levels: int = field(metadata={"static": True})
    block: int = field(metadata={"static": True})
    inputs: int = field(metadata={"static": True})
    steps: Any | None = None
    codebook: tuple[int, ...] | None = field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        """Rejects a layout that the kernels do not read, if the parts are arrays."""
        if not hasattr(self.words, "shape") or not hasattr(self.scales, "shape"):
            return
        rows, columns = self.words.shape[-2:]
        columns = columns // 2 if self.words.dtype == jnp.uint16 else columns
        blocks = BLOCKS
        if self.steps is not None:
            blocks = TWO_LEVEL_BLOCKS if self.per_code == 1 else ()
        if (rows, columns) != (1, 32 // self.per_code) or self.block not in blocks:
            raise ValueError(
                f"words {self.words.shape}, blocks of {self.block}: the GPU kernels read tiles of "
                f"one row and {32 // self.per_code} columns in blocks of {blocks}; repack them"
            )
        if self.codebook is not None and not (self.symmetric and len(self.codebook) == 16):
            raise ValueError(
                f"{len(self.codebook)} values for {self.levels} levels: the GPU kernels look up 16 "
                "values of blocks without a base"
            )

    @property
    def symmetric(self) -> bool:
        """Whether blocks have a scale and no base."""
        return int(self.scales.shape[-1]) == 1

    @property
    def parts(self) -> int:
        """Blocks per column: with two, codes below 16 belong to the first."""
        return 2 if self.block == 16 else 1

    @property
    def per_code(self) -> int:
        """p: weights per code."""
        return 2 if self.levels == 11 else 1

    @property
    def bits(self) -> int:
        """Bits of a code: words per column."""
        return int(self.words.shape[-3])

    @property
    def outputs(self) -> int:
        """Rows of the matrix."""
        return int(self.words.shape[-5])

    @property
    def superblocks(self) -> int:
        """Superblocks of a row: 1,024 weights each, for p = 1 and p = 2."""
        return int(self.words.shape[-4])

    @property
    def columns(self) -> int:
        """G: columns of a superblock."""
        return 32 // self.per_code

    @property
    def padded_inputs(self) -> int:
        """Inputs including the padding of the last superblock."""
        return self.superblocks * 32 * self.columns * self.per_code

    @property
    def nbytes(self) -> int:
        """Bytes of one matrix in memory."""
        arrays = [part for part in (self.words, self.scales, self.steps) if part is not None]
        return sum(math.prod(part.shape[-5:]) * part.dtype.itemsize for part in arrays)

    def half_words(self) -> Array:
        """Views the words as uint16 [matrices, outputs, superblocks, bits, 2 G]."""
        words = self.words
        if words.dtype == jnp.uint32:
            words = lax.bitcast_convert_type(words, jnp.uint16)
        return words.reshape(-1, self.outputs, self.superblocks, self.bits, 2 * self.columns)

    def numbers(self) -> tuple[Array, ...]:
        """Returns block numbers, arrays [matrices, outputs, superblocks, numbers of a superblock].

        Scales and bases in turn, in float16. In a two-level format the integers, then steps and
        floors in turn: a column has 1, 2 or 4 bytes of integers, stored as a uint8, a uint16, or a
        uint16 for each of its two blocks.
        """
        lead = (-1, self.outputs, self.superblocks)
        if self.steps is None:
            return (self.scales.reshape(*lead, math.prod(self.scales.shape[-2:])),)
        size = math.prod(self.scales.shape[-2:])
        if size == self.columns:
            integers = lax.bitcast_convert_type(self.scales, jnp.uint8).reshape(*lead, size)
        else:
            pairs = self.scales.reshape(*lead, size // 2, 2)
            integers = lax.bitcast_convert_type(pairs, jnp.uint16)
        return integers, self.steps.reshape(*lead, math.prod(self.steps.shape[-2:]))

    def dequantize(self, dtype: Any = jnp.float32) -> Array:
        """Dequantizes the matrices: [*stack, outputs, inputs]."""
        stack = self.words.shape[:-5]
        words = jnp.moveaxis(self.words.reshape(*self.words.shape[:-2], self.columns), -2, 0)
        four = [four_codes(words, s) for s in range(CODES)]  # of [*stack, outputs, superblocks, G]
        codes = jnp.stack(
            [(f >> jnp.uint32(8 * i)) & jnp.uint32(255) for f in four for i in range(4)], axis=-1
        )
        if self.per_code == 2:
            codes = jnp.stack([codes // jnp.uint32(11), codes % jnp.uint32(11)], axis=-3)
        if self.codebook is None:
            zero = self.levels // 2 if self.symmetric else 0
            q = (codes.astype(jnp.int32) - jnp.int32(zero)).astype(jnp.float32)
        else:
            q = jnp.asarray(self.codebook, jnp.float32)[codes]
        lead = (*stack, self.outputs, -1, 1, self.scales.shape[-1])
        scales = self.scales.astype(jnp.float32).reshape(lead)
        if self.steps is not None:
            steps = self.steps.astype(jnp.float32).reshape(lead)
            scales = scales * jnp.repeat(steps, SUPER // self.block, axis=-3)
        q = q.reshape(*stack, self.outputs, -1, self.block) * scales[..., 0]
        if not self.symmetric:
            q = q + scales[..., 1]
        return q.reshape(*stack, self.outputs, -1)[..., : self.inputs].astype(dtype)


def four_codes(words: Array, s: int) -> Array:
    """Packs codes 4 s .. 4 s + 3 of columns into a word's bytes: uint32 [bits, ...] -> [...]."""
    four = jnp.uint32(0)
    for byte, low, width, at in PIECES[words.shape[0]][s]:
        mask = jnp.uint32(((1 << width) - 1) * 0x01010101)
        four = four | (((words[byte] >> jnp.uint32(low)) & mask) << jnp.uint32(at))
    return jnp.asarray(four)


def arrange_inputs(x: Array, packed: PackedMatrix) -> Array:
    """Reorders x [rows, inputs] to a kernel's slices: [rows, superblocks, 16 p, 2 G]."""
    p, g = packed.per_code, packed.columns
    x = jnp.pad(x, ((0, 0), (0, packed.padded_inputs - x.shape[1])))
    x = x.reshape(-1, packed.superblocks, p, g, CODES, 2, 2)
    return x.transpose(0, 1, 2, 4, 6, 3, 5).reshape(-1, packed.superblocks, p * 16, 2 * g)

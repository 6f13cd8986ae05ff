"""Numbers of F16 as whole numbers: what they become for products of integers on a CPU.

A block of 64 numbers has a scale that is a power of two, so that its largest magnitude becomes 2^12
to 2^13. A code is the number divided by it, rounded to the nearest, ties to even. F16 down to a
quarter of the largest keeps all of its 11 significant bits, and no number is further off than a
2^-13th of that. Scales are float16, not below 2^-24, which all numbers of F16 are multiples of. The
scale of a block with a number that is not finite is NaN. (BF16 has blocks that no scale of float16
would do for.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jinfer.modelspec.quant_format import WIDE
from jinfer.quant.bit_packing import pack

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt, UInt8

BYTES = 2 * WIDE.block  # of a block in a file
TYPE = "F16"  # of checkpoints

_BITS = 13  # of the largest magnitude
_LEAST = -24  # power of two that float16 has


def whole_numbers(
    values: np.ndarray,
) -> tuple[Int[np.ndarray, "*blocks 64"], Float[np.ndarray, "*blocks"]]:
    """Codes, with their sign, and scales of [*blocks, 64] numbers."""
    with np.errstate(invalid="ignore"):  # what is no number may be a signalling one
        numbers = values.astype(np.float32)
        most = np.abs(numbers).max(axis=-1)
    finite = np.isfinite(most)
    most, numbers = np.where(finite, most, 0), np.where(finite[..., None], numbers, 0)
    power = np.maximum(np.where(most > 0, np.frexp(most)[1] - _BITS, _LEAST), _LEAST)
    codes = np.rint(np.ldexp(numbers, -power[..., None]))
    scales = np.where(finite, np.ldexp(np.float32(1), power), np.nan)
    return codes.astype(np.int16), scales.astype(np.float16)


def words(blocks: UInt8[np.ndarray, "n bytes"]) -> UInt[np.ndarray, "16 n 2"]:
    """A file's blocks as words, those of their two columns."""
    codes, _ = whole_numbers(blocks.view(np.float16))
    codes = codes.astype(np.int32) + WIDE.zero
    packed = pack(codes.astype(np.uint16).reshape(len(codes), 2, 32), WIDE.code_bits)
    return np.moveaxis(packed, -1, 0)


def scales(blocks: UInt8[np.ndarray, "n bytes"]) -> Float[np.ndarray, "n 1 1"]:
    """A file's blocks' scales."""
    return whole_numbers(blocks.view(np.float16))[1][:, None, None]

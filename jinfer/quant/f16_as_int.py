"""F16 weights as integers: 14-bit integer codes for integer dot products on AVX2 CPUs.

A block of 64 numbers has a power-of-two scale that brings its largest magnitude to 2^12 .. 2^13. A
code is the number divided by the scale, rounded to nearest, ties to even. F16 numbers down to a
quarter of the largest keep all 11 significant bits, and no error exceeds 2^-13 of the largest.
Scales are float16, not below 2^-24, of which all F16 numbers are multiples. The scale of a block
with a non-finite number is NaN. (BF16 can have blocks whose scale float16 cannot represent.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jinfer.quant.bit_packing import pack
from jinfer.quant_format import F16_AS_INT

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt, UInt8

BYTES = 2 * F16_AS_INT.block  # of a block, in bytes of a file
TYPE = "F16"  # type name in checkpoints

_BITS = 13  # of the largest magnitude
_LEAST = -24  # exponent of the least power of two in float16


def quantize_f16(
    values: np.ndarray,
) -> tuple[Int[np.ndarray, "*blocks 64"], Float[np.ndarray, "*blocks"]]:
    """Quantizes [*blocks, 64] numbers to signed codes and scales."""
    with np.errstate(invalid="ignore"):  # a signalling NaN raises a warning
        numbers = values.astype(np.float32)
        largest = np.abs(numbers).max(axis=-1)
    finite = np.isfinite(largest)
    largest, numbers = np.where(finite, largest, 0), np.where(finite[..., None], numbers, 0)
    power = np.maximum(np.where(largest > 0, np.frexp(largest)[1] - _BITS, _LEAST), _LEAST)
    codes = np.rint(np.ldexp(numbers, -power[..., None]))
    scales = np.where(finite, np.ldexp(np.float32(1), power), np.nan)
    return codes.astype(np.int16), scales.astype(np.float16)


def pack_words(blocks: UInt8[np.ndarray, "n bytes"]) -> UInt[np.ndarray, "16 n 2"]:
    """Packs a file's blocks to words of their two columns."""
    codes, _ = quantize_f16(blocks.view(np.float16))
    codes = codes.astype(np.int32) + F16_AS_INT.zero
    packed = pack(codes.astype(np.uint16).reshape(len(codes), 2, 32), F16_AS_INT.code_bits)
    return np.moveaxis(packed, -1, 0)


def scales(blocks: UInt8[np.ndarray, "n bytes"]) -> Float[np.ndarray, "n 1 1"]:
    """Returns the scales of a file's blocks."""
    return quantize_f16(blocks.view(np.float16))[1][:, None, None]

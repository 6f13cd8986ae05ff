"""Dequantize in registers: codes to fp16 weights, two at a time, between load and tensor cores.

A 32-bit register holds the two half-words of one column, and one instruction works on both. Each
step is written twice: as PTX, if `asm` is true, and in plain jax.numpy, which computes the same
without a GPU (interpret mode). Arrays are tiles [rows, 2 G] of 16-bit numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kernels_pallas.matmul.weight_layout import CODES, PIECES
from kernels_pallas.triton_ops import plt

_ONE = 0x3C00  # 1.0 in fp16; a code of b bits in the top of its mantissa gives 1 + q / 2**b
_1024 = 0x6400  # the same for a code in the lowest 8 bits: 1024 + q
_MANTISSA = 10

# Up to 4 bits one multiply-add turns a fraction into a weight: base - levels * scale, rounded to
# fp16, adds under 1% to the quantization's own error. From 5 bits on it would add more, and the
# code is made an integer first.
_EXACT_FROM = 32

# v * _ELEVENTH + _OFFSET is about 16 + (v % 121 + 1/2) / 11 for 1 + v / 128; its highest four bits
# of mantissa are 16 + v // 11, exactly, for all v < 121 (a test tries them all).
_ELEVENTH = float(np.uint16(0x49D1).view(np.float16))  # 128 / 11
_OFFSET = float(np.uint16(0x4467).view(np.float16))
_UPPER = 0xFFC0


class ScaleAndBase(NamedTuple):
    """Multiplier and addend of a fraction, as tiles [rows, 2 G] of fp16."""

    times: Array
    plus: Array | None


def fractions(words: Sequence[Array], bits: int, *, asm: bool) -> Iterator[tuple[int, int, Array]]:
    """Yields (s, e, f) for the 16 slices of a superblock.

    f is 1 + q / 2**bits in fp16; at 8 bits, where that would cost `weight` accuracy, 1024 + q.

    Args:
        words: uint16 [rows, 2 G] for each of `bits` words.
    """
    for s in range(CODES):
        pieces = PIECES[bits][s]
        if len(pieces) > 2:  # assembled once for both bytes, at the position of a whole code
            parts = [(words[p.byte], p.low - p.at, _both(p.width, p.at)) for p in pieces]
            sources = [(_collect(parts, 0, asm), 0, bits, 0)]
        else:
            sources = [(words[p.byte], p.low, p.width, p.at) for p in pieces]
        for e in range(2):
            if bits == 8:
                yield s, e, byte_of(words[s], e, asm=asm)
            else:
                yield s, e, _fraction(sources, bits, e, asm)


def _fraction(
    sources: Sequence[tuple[Array, int, int, int]], bits: int, e: int, asm: bool
) -> Array:
    top = _MANTISSA - bits
    parts = [
        (word, 8 * e + low - top - at, ((1 << width) - 1) << (top + at))
        for word, low, width, at in sources
    ]
    return _collect(parts, _ONE, asm)


def prepare_scales(
    tile: Array, levels: int, symmetric: bool, half: int, *, asm: bool
) -> ScaleAndBase:
    """Prepares the numbers for `weights` from the tile of a superblock's half, for all slices.

    Args:
        tile: float16 [rows, 2 G]: scale and base of a column's block in turn; symmetric: its scale
            twice.
    """
    scale = tile if symmetric else _spread(tile, 0, asm)
    base = None if symmetric else _spread(tile, 1, asm)
    return _prepared(scale, base, levels, half, asm)


def prepare_two_level_scales(
    integers: Array, steps: Array, levels: int, symmetric: bool, part: int, *, asm: bool
) -> ScaleAndBase:
    """Prepares scales of two-level formats: integers times the step and floor of 256 weights.

    Their products are rounded to fp16. For random blocks of Q4_K, Q5_K and Q6_K all rounding
    together, the weights' own too, is 0.6% of a step in root mean square; quantization's is 29%.

    Args:
        integers: uint16 [rows, 2 G]: in the bytes of a column's two half-words the scales of its
            one or two blocks, each with its minimum if there is one; the same in both half-words if
            one holds them all.
        steps: float16 [rows, 2 G]: step and floor in turn; symmetric: the step twice.
        part: the block of the column.
    """
    if symmetric:
        return _prepared(
            multiply(_integer(integers, part, asm), steps, asm=asm), None, levels, 0, asm
        )
    scale = multiply(_integer(integers, 2 * part, asm), _spread(steps, 0, asm), asm=asm)
    base = multiply(_integer(integers, 2 * part + 1, asm), _spread(steps, 1, asm), asm=asm)
    return _prepared(scale, base, levels, 0, asm)


def _prepared(scale: Array, base: Array | None, levels: int, half: int, asm: bool) -> ScaleAndBase:
    if levels >= _EXACT_FROM:
        return ScaleAndBase(scale, base)
    # A code of 0 reads as 1, which is `levels` steps; the first of a pair as 16, the second as 0.
    pair = levels == 11
    zero = (16 if half == 0 else 0) if pair else levels
    if base is None:
        plus = fma_by(scale, -float(zero + levels // 2), 0.0, asm=asm)
    else:
        plus = fma_by(scale, -float(zero), base, asm=asm) if zero else base
    return ScaleAndBase(scale if pair else fma_by(scale, float(levels), 0.0, asm=asm), plus)


def weights(f: Array, numbers: Sequence[ScaleAndBase], levels: int, *, asm: bool) -> list[Array]:
    """Computes the weights of a fraction: one tile, or two if codes are pairs."""
    if levels >= _EXACT_FROM:
        (only,) = numbers
        times, offset = (1.0, 1024) if levels == 256 else (float(levels), levels)
        if only.plus is None:
            return [
                multiply(
                    fma_by(f, times, -float(offset + levels // 2), asm=asm), only.times, asm=asm
                )
            ]
        return [fma(fma_by(f, times, -float(offset), asm=asm), only.times, only.plus, asm=asm)]
    if levels != 11:
        (only,) = numbers
        return [_plain(f, only, asm)]
    first = _and(fma_by(f, _ELEVENTH, _OFFSET, asm=asm), _UPPER, asm)  # 16 + x
    # v - 11 x = (128 f - 128) - 11 (first - 16); every step is exact.
    second = fma_by(first, -11.0, fma_by(f, 128.0, 48.0, asm=asm), asm=asm)
    return [_plain(first, numbers[0], asm), _plain(second, numbers[1], asm)]


def _plain(q: Array, numbers: ScaleAndBase, asm: bool) -> Array:
    assert numbers.plus is not None
    return fma(q, numbers.times, numbers.plus, asm=asm)


def fma(a: Array, b: Array, c: Array, *, asm: bool) -> Array:
    """Computes a * b + c in fp16."""
    if asm:
        return ptx("fma.rn.f16x2 $0, $1, $2, $3;", [a, b, c])
    return a * b + c


def fma_by(a: Array, b: float, c: Array | float, *, asm: bool) -> Array:
    """Computes a * b + c in fp16; b, and c if it is not an array, are exact in fp16."""
    if not asm:
        return a * np.float16(b) + (np.float16(c) if isinstance(c, float) else c)
    if isinstance(c, float):
        body = f".reg .b32 b, c; mov.b32 b, {_twice(b)}; mov.b32 c, {_twice(c)};"
        return ptx(body + "fma.rn.f16x2 $0, $1, b, c;", [a])
    body = f".reg .b32 b; mov.b32 b, {_twice(b)}; fma.rn.f16x2 $0, $1, b, $2;"
    return ptx(body, [a, c])


def multiply(a: Array, b: Array, *, asm: bool) -> Array:
    """Computes a * b in fp16."""
    return ptx("mul.rn.f16x2 $0, $1, $2;", [a, b]) if asm else a * b


def _spread(tile: Array, which: int, asm: bool) -> Array:
    """Copies the first or the second number of each pair to both positions."""
    if asm:
        body = f"prmt.b32 $0, $1, $1, {0x3232 if which else 0x1010};"
        return ptx(body, [tile])
    pairs = tile.reshape(tile.shape[0], -1, 2)
    return jnp.repeat(pairs[:, :, which], 2, axis=1)


def _integer(tile: Array, byte: int, asm: bool) -> Array:
    """Extracts one of the four signed bytes of each column, for both its half-words."""
    if asm:
        body = ".reg .b32 t, k; xor.b32 t, $1, 0x80808080; mov.b32 k, 0x64646464;"
        found = ptx(body + f"prmt.b32 $0, t, k, {0x4040 + 0x0101 * byte:#x};", [tile])
    else:
        half = _spread(tile, byte // 2, asm)
        found = byte_of(half ^ np.uint16(0x8080), byte % 2, asm=asm)
    return fma_by(found, 1.0, -1152.0, asm=asm)


def byte_of(words: Array, e: int, *, asm: bool) -> Array:
    """Computes 1024 + the low or high byte of each half-word."""
    if asm:
        selector = 0x4341 if e else 0x4240
        body = f".reg .b32 k; mov.b32 k, 0x64646464; prmt.b32 $0, $1, k, {selector};"
        return ptx(body, [words])
    byte = (words >> np.uint16(8 * e)) & np.uint16(0xFF)
    return lax.bitcast_convert_type(byte | np.uint16(_1024), jnp.float16)


def _collect(parts: Sequence[tuple[Array, int, int]], start: int, asm: bool) -> Array:
    """Computes start | (word >> shift) & mask for each part, as fp16; a negative shift goes left.

    Bits that a 32-bit shift moves over from the other half-word fall outside the mask.
    """
    if not asm:
        result: Any = np.uint16(start)
        for word, shift, mask in parts:
            if word.dtype != jnp.uint16:
                word = lax.bitcast_convert_type(word, jnp.uint16)
            moved = word >> np.uint16(shift) if shift >= 0 else word << np.uint16(-shift)
            result = result | (moved & np.uint16(mask))
        return lax.bitcast_convert_type(result, jnp.float16)
    body = ".reg .b32 t, r;"
    before = f"{start * 0x10001:#x}"
    for number, (_, shift, mask) in enumerate(parts, start=1):
        source, into = f"${number}", "$0" if number == len(parts) else "r"
        if shift:
            body += f"{'shr' if shift > 0 else 'shl'}.b32 t, {source}, {abs(shift)};"
            source = "t"
        body += f"lop3.b32 {into}, {source}, {mask * 0x10001:#x}, {before}, 0xEA;"
        before = "r"
    return ptx(body, [word for word, _, _ in parts])


def _both(width: int, at: int) -> int:
    return (((1 << width) - 1) << at) * 0x0101


def _and(value: Array, mask: int, asm: bool) -> Array:
    if asm:
        return ptx(f"and.b32 $0, $1, {mask * 0x10001:#x};", [value])
    bits = lax.bitcast_convert_type(value, jnp.uint16) & np.uint16(mask)
    return lax.bitcast_convert_type(bits, jnp.float16)


def _twice(value: float) -> str:
    return hex(int(np.float16(value).view(np.uint16)) * 0x10001)


def ptx(body: str, args: Sequence[Array]) -> Array:
    """Emits PTX on registers of two 16-bit numbers each: $0 is the result, $1 the first argument.

    The result is always declared fp16: Triton supports no other type.
    """
    (result,) = plt.elementwise_inline_asm(
        "{" + body + "}",
        args=list(args),
        constraints=",".join(["=r"] + ["r"] * len(args)),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float16)],
    )
    return result

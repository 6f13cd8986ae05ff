"""Codebook lookup: 4-bit codes to values of a table (IQ4_NL, MXFP4), four at a time.

`prmt` selects four bytes out of the eight of two registers by 4-bit indices: three of them look up
four of 16 values: for codes below 8, for the others, and a selection by the codes' highest bits. A
table byte is the upper byte of the value in fp16 if the lower one is 0, as for the values of E2M1,
otherwise the value + 128.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.matmul.unpack import byte_of, fma_by, ptx

_TIMES = 4  # of each register in a table


def table(values: Sequence[int]) -> np.ndarray:
    """Four registers with the bytes of 16 values, and one with the bytes beside them: uint16.

    Each is stored four times, so that every thread holding columns reads another address: what all
    threads read would be kept in uniform registers, which `prmt` does not take.
    """
    found, upper = _bytes(values)
    beside = np.full(4, 0 if upper else 0x64, np.uint8)
    registers = np.concatenate([found, beside]).view("<u4")
    return registers.repeat(_TIMES).view("<u2")


def tiles(ref: Any, shape: tuple[int, ...]) -> list[Array]:
    """The registers of `table`, each as a tile of this shape."""
    size = 2 * _TIMES
    spread = (shape[0], shape[1] // size, size)
    return [
        lax.broadcast_in_dim(ref[pl.ds(size * n, size)], spread, (2,)).reshape(shape)
        for n in range(ref.shape[0] // size)
    ]


def look_up(
    words: Sequence[Array], values: Sequence[int], registers: Sequence[Array], *, asm: bool
) -> Iterator[tuple[int, int, Array]]:
    """(s, e, the codes' values in fp16) for the 16 slices of a superblock.

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
    """uint8 [16] for the values, and whether they are upper bytes of fp16."""
    halves = np.asarray(values, np.float16).view(np.uint16)
    if not np.any(halves & 0xFF):
        return (halves >> 8).astype(np.uint8), True
    return np.asarray([value + 128 for value in values], np.uint8), False


def _both(word: Array, registers: Sequence[Array]) -> list[Array]:
    """The values of the codes in the low byte of each half-word, in its two bytes; then the others.

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
    """The values of the codes in the low byte of each half-word, in its two bytes."""
    low, high = (_chosen(codes >> np.uint16(shift), found) for shift in (0, 4))
    return low | high << np.uint16(8)


def _chosen(codes: Array, found: np.ndarray) -> Array:
    """By a tree of selects, one for each of the four lowest bits."""
    left: list[Any] = [np.uint16(byte) for byte in found]
    for bit in range(4):
        odd = (codes >> np.uint16(bit)) & np.uint16(1) != np.uint16(0)
        pairs = zip(left[::2], left[1::2], strict=True)
        left = [jnp.where(odd, second, first) for first, second in pairs]
    return left[0]


def _value(pair: Array, high: int, upper: bool, registers: Sequence[Array], asm: bool) -> Array:
    """The value of the low or high byte of each half-word."""
    if asm:
        selector = (0x3414 if high else 0x2404) if upper else (0x4341 if high else 0x4240)
        found = ptx(f"prmt.b32 $0, $1, $2, {selector:#x};", [pair, registers[4]])
    elif upper:
        byte = pair & np.uint16(0xFF00) if high else pair << np.uint16(8)
        found = lax.bitcast_convert_type(byte, jnp.float16)
    else:
        found = byte_of(pair, high, asm=asm)
    return found if upper else fma_by(found, 1.0, -1152.0, asm=asm)

"""Bit packing: codes as packed words, and back.

Eight codes of b bits fill b bytes. Four such strips, interleaved byte by byte, are b words of 32
bits that hold 32 codes: code 4 s + i is code s of strip i. So one shift and one mask on a word give
four codes at once, each in its own byte, as a byte dot product takes them; the same shift on the
two half-words gives the two fp16 fractions that a tensor core's operand needs.

If b does not divide 8, byte t holds code t in its low bits, and the remaining bits hold the last
codes in pieces.

16-bit codes are stored in pairs, minus 2^15, as the signed numbers that are multiplied.
"""

from __future__ import annotations

from itertools import zip_longest
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np


class BitField(NamedTuple):
    """A bit field of a code: `(byte >> low) & (2**width - 1)` gives bits `at`.. of the code."""

    byte: int
    low: int
    width: int
    at: int


_NOTHING = BitField(0, 0, 0, 0)
_SIGN = 0x8000  # of a 16-bit code

# PIECES[code_bits][code]: bit fields of each of 8 codes in code_bits bytes.
PIECES: dict[int, tuple[tuple[BitField, ...], ...]] = {
    2: tuple((BitField(s % 2, 2 * (s // 2), 2, 0),) for s in range(8)),
    3: (
        *((BitField(s % 3, 3 * (s // 3), 3, 0),) for s in range(6)),
        (BitField(0, 6, 2, 0), BitField(2, 6, 1, 2)),
        (BitField(1, 6, 2, 0), BitField(2, 7, 1, 2)),
    ),
    4: tuple((BitField(s % 4, 4 * (s // 4), 4, 0),) for s in range(8)),
    5: (
        *((BitField(s, 0, 5, 0),) for s in range(5)),
        (BitField(0, 5, 3, 0), BitField(1, 5, 2, 3)),
        (BitField(2, 5, 3, 0), BitField(3, 5, 2, 3)),
        (BitField(4, 5, 3, 0), BitField(1, 7, 1, 3), BitField(3, 7, 1, 4)),
    ),
    6: (
        *((BitField(s, 0, 6, 0),) for s in range(6)),
        (BitField(0, 6, 2, 0), BitField(1, 6, 2, 2), BitField(2, 6, 2, 4)),
        (BitField(3, 6, 2, 0), BitField(4, 6, 2, 2), BitField(5, 6, 2, 4)),
    ),
    7: (
        *((BitField(s, 0, 7, 0),) for s in range(7)),
        tuple(BitField(t, 7, 1, t) for t in range(7)),
    ),
    8: tuple((BitField(s, 0, 8, 0),) for s in range(8)),
}


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8, or uint16 for 16 bits, [..., 32] below 2**bits -> uint32 [..., bits]."""
    if bits == 16:
        return np.ascontiguousarray(codes ^ np.uint16(_SIGN)).view("<u4")
    fours = np.ascontiguousarray(codes).view("<u4")  # [..., 8]
    return np.moveaxis(pack_fours(np.ascontiguousarray(np.moveaxis(fours, -1, 0)), bits), 0, -1)


def pack_fours(fours: np.ndarray, bits: int) -> np.ndarray:
    """Packs eight words of four codes; the inverse of `unpack_four`.

    Args:
        fours: uint32 [8, ...], with codes 4 s .. 4 s + 3 in the four bytes of number s.

    Returns:
        uint32 [bits, ...].
    """
    words = np.empty((bits, *fours.shape[1:]), np.uint32)
    for s, pieces in enumerate(PIECES[bits]):
        for byte, low, width, at in pieces:
            piece = fours[s]
            if at:
                piece = piece >> np.uint32(at)
            if width < bits:
                piece = piece & np.uint32(((1 << width) - 1) * 0x01010101)
            if low == 0:  # the first piece of every byte
                words[byte] = piece
            else:
                words[byte] |= piece << np.uint32(low)
    return words


def unpack(words: Any, bits: int, xp: ModuleType = np) -> Any:
    """uint32 [..., bits] -> uint32 [..., 32].

    One expression for all codes, of which XLA makes one loop instead of 32.

    Args:
        xp: numpy, or jax.numpy for JAX arrays.
    """
    if bits == 16:
        pairs = xp.stack([words & xp.uint32(0xFFFF), words >> xp.uint32(16)], axis=-1)
        return pairs.reshape(*words.shape[:-1], 32) ^ xp.uint32(_SIGN)
    lead = (1,) * (words.ndim - 1)
    strip = np.arange(0, 32, 8, dtype=np.uint32)
    codes: Any = None
    for pieces in zip_longest(*PIECES[bits], fillvalue=_NOTHING):
        byte, low, width, at = np.array(pieces, np.uint32).T[..., None]
        which = byte[:, 0].astype(np.int32)
        shift, mask, up = (
            xp.asarray(numbers.reshape(*lead, 8, -1))
            for numbers in (low + strip, (1 << width) - 1, at)
        )
        piece = ((xp.take(words, which, axis=-1, mode="clip")[..., None] >> shift) & mask) << up
        codes = piece if codes is None else codes | piece
    return codes.reshape(*words.shape[:-1], 32)


def unpack_four(words: Any, bits: int, s: int, xp: ModuleType = np) -> Any:
    """Codes 4 s .. 4 s + 3 in the four bytes of a uint32: [..., bits] -> [...]."""
    four = None
    for byte, low, width, at in PIECES[bits][s]:
        mask = xp.uint32(((1 << width) - 1) * 0x01010101)
        piece = ((words[..., byte] >> xp.uint32(low)) & mask) << xp.uint32(at)
        four = piece if four is None else four | piece
    return four

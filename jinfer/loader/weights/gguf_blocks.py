"""GGUF blocks (Q4_0 ... Q6_K, IQ4, MXFP4) repacked without loss, never decoded.

A block of a supported type is codes and block numbers in another order. With s and m the integers
of a part of a block, every type's value is one of `QuantFormat`'s equations, in the same operations
on the same numbers as in `jinfer.loader.checkpoint.ggml_types`:

    Q4_0 Q5_0 Q8_0     scale * (q - zero)                    32 weights to a scale
    Q4_1 Q5_1          scale * q + base                      32
    IQ4_NL MXFP4       scale * codebook[q]                   32
    Q2_K               (s * d) * q + m * -dmin               16, d and dmin of 256
    Q4_K Q5_K          (s * d) * q + m * -dmin               32, d and dmin of 256
    Q3_K Q6_K          (s * d) * (q - zero)                  16, d of 256
    IQ4_XS             (s * d) * codebook[q]                 32, d of 256

No product has more significant bits than float32, so at most the sum is rounded.

On request F16 matrices become blocks of integers, nearly without loss: see
`jinfer.quant.f16_as_int`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from jinfer.cpu import repack_gguf
from jinfer.loader.checkpoint.checkpoint_reader import Tensor
from jinfer.loader.checkpoint.ggml_types import BLOCKS, q3_k_scales, six_bit_numbers
from jinfer.loader.checkpoint.mapped_file import release
from jinfer.quant import f16_as_int
from jinfer.quant.bit_packing import pack_fours
from jinfer.quant.quantized_tensor import CHUNK, QuantizedTensor, empty_tensor, fill_rows
from jinfer.quant_format import F16_AS_INT, QuantFormat, Width

if TYPE_CHECKING:
    from jaxtyping import Int, UInt8

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the numbers of E2M1, times half their scale.
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class _BlockLayout:
    """Functions that repack the blocks of a type.

    Attributes:
        format: the resulting format.
        words: uint8 [n, bytes] -> uint32 [bits, n, columns], with the columns of a block.
        scales: uint8 [n, bytes] -> [n, parts, numbers], with the parts of a block.
        steps: uint8 [n, bytes] -> float16 [n, numbers], if the format is two-level.
        check: uint8 [n, bytes] -> whether these blocks can be repacked, if that depends on values.
    """

    format: QuantFormat
    words: Callable[[np.ndarray], np.ndarray]
    scales: Callable[[np.ndarray], np.ndarray]
    steps: Callable[[np.ndarray], np.ndarray] | None = None
    check: Callable[[np.ndarray], bool] | None = None


def repacked_format(stored: Tensor | Sequence[Tensor], halves: bool = False) -> QuantFormat | None:
    """Returns the format of `repacked_tensor`; None if the numbers have to be decoded.

    Only MXFP4 requires reading the data: its scales may exceed float16's range.

    Args:
        halves: represent F16 as integers, if rows are whole blocks.

    Raises:
        CheckpointError: the file is broken.
    """
    tensors = [stored] if isinstance(stored, Tensor) else stored
    kinds = {_KINDS.get(tensor.type) if len(tensor.shape) > 1 else None for tensor in tensors}
    kind = kinds.pop()
    if kinds or kind is None:
        return None
    if kind.format == F16_AS_INT and not (halves and tensors[0].shape[-1] % F16_AS_INT.block == 0):
        return None
    if kind.check is not None and not all(kind.check(_blocks(tensor)) for tensor in tensors):
        return None
    return kind.format


def repacked_tensor(
    stored: Tensor | Sequence[Tensor],
    rows: slice | np.ndarray | None = None,
    *,
    columns: int | None = None,
    halves: bool = False,
) -> QuantizedTensor | None:
    """Read matrices in the stored format, with a few MB of memory beyond the result.

    Args:
        stored: a matrix [outputs, inputs] or a stack of them; or several tensors of the same
            shape, which are stacked along a new first axis.
        rows: rows of each matrix to read, in this order; None: all.
        columns: see `from_codes`.
        halves: see `repacked_format`.

    Returns:
        A tensor of NumPy arrays, which `jax.device_put` to a CPU does not copy; None if the numbers
        have to be decoded: unsupported or mixed types.

    Raises:
        CheckpointError: a file is broken.
    """
    format = repacked_format(stored, halves)
    if format is None:
        return None
    tensors = [stored] if isinstance(stored, Tensor) else stored
    several = () if isinstance(stored, Tensor) else (len(tensors),)
    *stack, outputs, inputs = tensors[0].shape
    if not (rows is None or isinstance(rows, slice)):
        rows = np.arange(outputs)[rows]
    count = outputs if rows is None else len(np.arange(outputs)[rows])
    result = empty_tensor((*several, *stack, count, inputs), format, columns)
    for e, tensor in enumerate(tensors):
        raw = tensor.raw().reshape(*stack, outputs, -1)
        for index in np.ndindex(*stack):
            matrix = (e, *index) if several else index
            repack(tensor.type, raw[index], result[matrix or ...], rows)
    return result


def repack(
    type_name: str,
    raw: UInt8[np.ndarray, "rows bytes"],
    target: QuantizedTensor,
    rows: slice | Int[np.ndarray, " outputs"] | None = None,
) -> None:
    """Fill a matrix with stored blocks.

    Args:
        type_name: a supported type, such as "Q4_1".
        raw: the file's rows.
        target: a matrix that `empty_tensor` made in this type's format.
        rows: the file's rows to take, in order; None: all.
    """
    kind, size = _KINDS[type_name], _bytes(type_name)
    if isinstance(rows, slice):
        raw, rows = raw[rows], None
    height = max(1, CHUNK // (target.rows * target.inputs)) * target.rows
    for begin in range(0, target.outputs, height):
        count = min(height, target.outputs - begin)
        part = slice(begin, begin + count)
        selected = raw[part if rows is None else rows[part]]
        tile, sizes = begin // target.rows, (size, _values(type_name))
        words, scales = target.words[tile:], target.scales[tile:]
        steps = None if target.steps is None else target.steps[tile:]
        if not repack_gguf.repack(type_name, selected, sizes, words, scales, steps):
            _repack(kind, selected.reshape(-1, size), begin, count, target)
        if rows is None:
            release(selected)  # avoids a second copy of a large tensor


def _repack(
    kind: _BlockLayout, blocks: np.ndarray, begin: int, count: int, target: QuantizedTensor
) -> None:
    """Fill `count` rows from row `begin`: the reference for the compiled code."""
    words = kind.words(blocks)
    scales = kind.scales(blocks).reshape(count, -1, kind.format.numbers)
    steps = None
    if kind.steps is not None:
        steps = kind.steps(blocks).reshape(count, -1, kind.format.numbers)
    fill_rows(target, begin, words.reshape(len(words), count, -1), scales, steps)


def _blocks(tensor: Tensor) -> np.ndarray:
    return tensor.raw().reshape(-1, _bytes(tensor.type))


def _bytes(type_name: str) -> int:
    """Bytes per block."""
    return f16_as_int.BYTES if type_name == f16_as_int.TYPE else BLOCKS[type_name].bytes


def _values(type_name: str) -> int:
    """Weights per block."""
    return F16_AS_INT.block if type_name == f16_as_int.TYPE else BLOCKS[type_name].values


# A field of codes is read as uint32 words of four consecutive codes (or parts of codes), as
# `pack_fours` takes them.

_FIRST_BIT, _TWO_BITS, _NIBBLE = (np.uint32(bits * 0x01010101) for bits in (1, 3, 15))


def _field(blocks: np.ndarray, at: int, count: int) -> np.ndarray:
    """Words from byte `at` of every block: uint32 [count, n]."""
    return np.ascontiguousarray(blocks[:, at : at + 4 * count].view("<u4").T)


def _halves(at: int, count: int) -> Callable[[np.ndarray], np.ndarray]:
    """Consecutive float16 fields: float16 [n, 1, count]."""
    return lambda blocks: blocks[:, None, at : at + 2 * count].view("<f2")


# Types of 32 weights: a column to a block.


def _nibble_words(at: int) -> Callable[[np.ndarray], np.ndarray]:
    """Codes 0-15 in low nibbles, 16-31 in high nibbles: already the words of a column."""
    return lambda blocks: _field(blocks, at, 4)[:, :, None]


def _five_bit_words(at: int) -> Callable[[np.ndarray], np.ndarray]:
    """32 fifth bits, then nibbles."""

    def words(blocks: np.ndarray) -> np.ndarray:
        fifth, *low = _field(blocks, at, 5)
        fours = np.empty((8, len(blocks)), np.uint32)
        for s in range(8):
            fours[s] = (low[s % 4] >> np.uint32(4 * (s // 4))) & _NIBBLE
            # Spread four adjacent bits to four bytes: bit i moves to 8 i, by a multiplication.
            bits = (fifth >> np.uint32(4 * s)) & np.uint32(15)
            fours[s] |= ((bits * np.uint32(0x00204081)) & _FIRST_BIT) << np.uint32(4)
        return pack_fours(fours, 5)[:, :, None]

    return words


def _q8_0_words(blocks: np.ndarray) -> np.ndarray:
    return (_field(blocks, 2, 8) ^ np.uint32(0x80808080))[:, :, None]


def _mxfp4_scales(blocks: np.ndarray) -> np.ndarray:
    return _POWERS[blocks[:, 0]][:, None, None]


def _mxfp4_check(blocks: np.ndarray) -> bool:
    """Whether float16 can represent the scales of all blocks that are not zero anyway."""
    others = np.flatnonzero(_POWERS[blocks[:, 0]] == 0)
    return not (blocks[others, 1:] & 0x77).any()


def _powers() -> np.ndarray:
    """Exponent -> half of MXFP4's scale, 2 ** (exponent - 128); 0 outside float16's range."""
    exponents = np.arange(256)
    held = (exponents >= 128 - 24) & (exponents <= 128 + 15)
    return np.ldexp(held.astype(np.float32), exponents - 128).astype(np.float16)


_POWERS = _powers()


# Types of 256 weights: eight columns to a block.


def _pieces(
    blocks: np.ndarray, at: int, mask: np.uint32, places: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Bits of the codes of each column.

    Args:
        at: first byte of the field.
        places: per column, the first of its eight words in the field, and its lowest bit in each
            byte.

    Returns:
        uint32 [8, n, 8].
    """
    field = _field(blocks, at, max(first for first, _ in places) + 8)
    fours = np.empty((8, len(blocks), 8), np.uint32)
    for column, (first, low) in enumerate(places):
        fours[:, :, column] = (field[first : first + 8] >> np.uint32(low)) & mask
    return fours


_BITS = [(0, column) for column in range(8)]
_PAIRS = [(8 * (column // 4), 2 * (column % 4)) for column in range(8)]
_HALVES = [(8 * (column // 2), 4 * (column % 2)) for column in range(8)]
_HALVES_OF_64 = [(16 * (c // 4) + 8 * (c % 2), 4 * (c // 2 % 2)) for c in range(8)]


type _Field = tuple[int, np.uint32, Sequence[tuple[int, int]]]  # arguments of `_pieces`


def _k_words(bits: int, low: _Field, high: _Field | None = None) -> Callable[..., np.ndarray]:
    """Codes whose low bits are in a field, and the bits above them in another."""

    def words(blocks: np.ndarray) -> np.ndarray:
        fours = _pieces(blocks, *low)
        if high is not None:
            fours |= _pieces(blocks, *high) << np.uint32(int(low[1] & 15).bit_length())
        return pack_fours(fours, bits)

    return words


_q2_k_words = _k_words(2, (16, _TWO_BITS, _PAIRS))
_q3_k_words = _k_words(3, (32, _TWO_BITS, _PAIRS), (0, _FIRST_BIT, _BITS))
_q4_k_words = _k_words(4, (16, _NIBBLE, _HALVES))
_q5_k_words = _k_words(5, (48, _NIBBLE, _HALVES), (16, _FIRST_BIT, _BITS))
_q6_k_words = _k_words(6, (0, _NIBBLE, _HALVES_OF_64), (128, _TWO_BITS, _PAIRS))


def _iq4_xs_words(blocks: np.ndarray) -> np.ndarray:
    columns = blocks[:, 8:].view("<u4").reshape(len(blocks), 8, 4)
    return np.ascontiguousarray(columns.transpose(2, 0, 1))


def _integers(*numbers: np.ndarray) -> np.ndarray:
    """s, or s and m, each [n, parts] with values of int8 -> int8 [n, parts, numbers]."""
    return np.stack(numbers, axis=-1).view(np.int8)


def _q2_k_scales(blocks: np.ndarray) -> np.ndarray:
    return _integers(blocks[:, :16] & 15, blocks[:, :16] >> 4)


def _q3_k_scales(blocks: np.ndarray) -> np.ndarray:
    return _integers(q3_k_scales(blocks))


def _q4_k_scales(blocks: np.ndarray) -> np.ndarray:
    return _integers(*six_bit_numbers(blocks))


def _q6_k_scales(blocks: np.ndarray) -> np.ndarray:
    return _integers(blocks[:, 192:208])


def _iq4_xs_scales(blocks: np.ndarray) -> np.ndarray:
    """8 numbers of 6 bits: two low nibbles in each of 4 bytes, pairs of high bits in a uint16."""
    column = np.arange(8, dtype=np.uint8)
    low = (np.repeat(blocks[:, 4:8], 2, axis=1) >> (4 * (column % 2))) & 15
    high = (np.repeat(blocks[:, 2:4], 4, axis=1) >> (2 * (column % 4))) & 3
    return _integers((low | high << 4) - np.uint8(32))


def _step_and_floor(at: int) -> Callable[[np.ndarray], np.ndarray]:
    """d and -dmin, which are adjacent."""
    signs = np.array([0, 0x8000], np.uint16)
    return lambda blocks: (blocks[:, at : at + 4].view("<u2") ^ signs).view(np.float16)


def _of_256(width: Width, block: int, symmetric: bool = False) -> QuantFormat:
    return QuantFormat(width, block, symmetric, two_level=True)


def _with_values(values: tuple[int, ...], two_level: bool = False) -> QuantFormat:
    return QuantFormat("4", 32, symmetric=True, two_level=two_level, codebook=values)


_KINDS: Mapping[str, _BlockLayout] = MappingProxyType(
    {
        "Q4_0": _BlockLayout(QuantFormat("4", symmetric=True), _nibble_words(2), _halves(0, 1)),
        "Q4_1": _BlockLayout(QuantFormat("4"), _nibble_words(4), _halves(0, 2)),
        "Q5_0": _BlockLayout(QuantFormat("5", symmetric=True), _five_bit_words(2), _halves(0, 1)),
        "Q5_1": _BlockLayout(QuantFormat("5"), _five_bit_words(4), _halves(0, 2)),
        "Q8_0": _BlockLayout(QuantFormat("8", symmetric=True), _q8_0_words, _halves(0, 1)),
        "IQ4_NL": _BlockLayout(_with_values(_IQ4), _nibble_words(2), _halves(0, 1)),
        "MXFP4": _BlockLayout(
            _with_values(_E2M1), _nibble_words(1), _mxfp4_scales, check=_mxfp4_check
        ),
        "Q2_K": _BlockLayout(_of_256("2", 16), _q2_k_words, _q2_k_scales, _step_and_floor(80)),
        "Q3_K": _BlockLayout(_of_256("3", 16, True), _q3_k_words, _q3_k_scales, _halves(108, 1)),
        "Q4_K": _BlockLayout(_of_256("4", 32), _q4_k_words, _q4_k_scales, _step_and_floor(0)),
        "Q5_K": _BlockLayout(_of_256("5", 32), _q5_k_words, _q4_k_scales, _step_and_floor(0)),
        "Q6_K": _BlockLayout(_of_256("6", 16, True), _q6_k_words, _q6_k_scales, _halves(208, 1)),
        "IQ4_XS": _BlockLayout(
            _with_values(_IQ4, True), _iq4_xs_words, _iq4_xs_scales, _halves(0, 1)
        ),
        f16_as_int.TYPE: _BlockLayout(F16_AS_INT, f16_as_int.pack_words, f16_as_int.scales),
    }
)
# Block type -> the format it is repacked to.
REPACKED_FORMATS: Mapping[str, QuantFormat] = MappingProxyType(
    {name: kind.format for name, kind in _KINDS.items() if name != f16_as_int.TYPE}
)

"""GGML's tensor types: the size of a block, and decoding its numbers.

A tensor's rows are cut into blocks of `values` numbers, each stored in `bytes` bytes. The layouts
are those of ggml's block structs; every multi-byte field is little-endian. The common types are
decoded here, the rare ones by the `gguf` package, which is slower but knows them all; both give
the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import DTYPES

_CHUNK = 1 << 17  # values decoded at a time: float32 results and temporaries stay in the L2 cache


@dataclass(frozen=True)
class Block:
    """The unit in which a GGML type is stored.

    Attributes:
        name: ggml's name in capitals, "Q4_1".
        type_id: its number in a GGUF file.
        values: numbers in a block; a row is a whole number of blocks.
        bytes: size of a block.
    """

    name: str
    type_id: int
    values: int
    bytes: int


BLOCKS: Mapping[str, Block] = MappingProxyType(
    {
        name: Block(name, type_id, values, nbytes)
        for name, type_id, values, nbytes in [
            ("F32", 0, 1, 4),
            ("F16", 1, 1, 2),
            ("Q4_0", 2, 32, 18),
            ("Q4_1", 3, 32, 20),
            ("Q5_0", 6, 32, 22),
            ("Q5_1", 7, 32, 24),
            ("Q8_0", 8, 32, 34),
            ("Q8_1", 9, 32, 36),
            ("Q2_K", 10, 256, 84),
            ("Q3_K", 11, 256, 110),
            ("Q4_K", 12, 256, 144),
            ("Q5_K", 13, 256, 176),
            ("Q6_K", 14, 256, 210),
            ("Q8_K", 15, 256, 292),
            ("IQ2_XXS", 16, 256, 66),
            ("IQ2_XS", 17, 256, 74),
            ("IQ3_XXS", 18, 256, 98),
            ("IQ1_S", 19, 256, 50),
            ("IQ4_NL", 20, 32, 18),
            ("IQ3_S", 21, 256, 110),
            ("IQ2_S", 22, 256, 82),
            ("IQ4_XS", 23, 256, 136),
            ("I8", 24, 1, 1),
            ("I16", 25, 1, 2),
            ("I32", 26, 1, 4),
            ("I64", 27, 1, 8),
            ("F64", 28, 1, 8),
            ("IQ1_M", 29, 256, 56),
            ("BF16", 30, 1, 2),
            ("TQ1_0", 34, 256, 54),
            ("TQ2_0", 35, 256, 66),
            ("MXFP4", 39, 32, 17),
            ("NVFP4", 40, 64, 36),
            ("Q1_0", 41, 128, 18),
        ]
    }
)

PLAIN: Mapping[str, np.dtype] = MappingProxyType(
    {name: DTYPES[name] for name in ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")}
)

_BY_ID = {block.type_id: block for block in BLOCKS.values()}


def block_of(type_id: int) -> Block | None:
    """The block of a type number, or None where neither jinfer nor the `gguf` package knows it."""
    return _BY_ID.get(type_id) or _newer_blocks().get(type_id)


@cache
def _newer_blocks() -> dict[int, Block]:
    # Imported late: the package takes as long to import as NumPy, and most files do not need it.
    from gguf.constants import GGML_QUANT_SIZES

    return {
        int(kind): Block(kind.name, int(kind), *size) for kind, size in GGML_QUANT_SIZES.items()
    }


def decode(type_name: str, raw: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Decode stored blocks into numbers.

    Args:
        type_name: a GGML type, "Q4_1".
        raw: uint8 [nbytes], whole blocks, fields little-endian.
        shape: shape of the result, outermost dimension first; its last one is a whole number of
            blocks.

    Returns:
        float32 [shape], a new array, bit for bit what ggml's own decoder gives.

    Raises:
        ValueError: the type is unknown or cannot be decoded, or `raw` does not have the size
            of `shape`.
    """
    block = BLOCKS.get(type_name) or next(
        (b for b in _newer_blocks().values() if b.name == type_name), None
    )
    if block is None:
        raise ValueError(f"{type_name} is no GGML type; known are {', '.join(BLOCKS)}")
    count = math.prod(shape)
    if count % block.values or raw.size * block.values != count * block.bytes:
        raise ValueError(
            f"{type_name} blocks of {block.values} values, {block.bytes} bytes: {raw.size} bytes"
            f" are not the shape {tuple(shape)}"
        )
    if type_name in PLAIN:
        with np.errstate(over="ignore"):  # a float64 beyond float32 is infinite
            return raw.view(PLAIN[type_name]).reshape(shape).astype(np.float32)
    decoder = _DECODERS.get(type_name) or _package_decoder(type_name)
    blocks = raw.reshape(-1, block.bytes)
    out = np.empty((len(blocks), block.values), np.float32)
    step = max(1, _CHUNK // block.values)
    with np.errstate(all="ignore"):  # scales may be anything, inf * 0 included
        for start in range(0, len(blocks), step):
            decoder(blocks[start : start + step], out[start : start + step])
    return out.reshape(shape)


# Byte offsets of the float16 fields, the only multi-byte fields, of the block types whose
# big-endian form is agreed on; the others have packed bit fields that ggml's own converter does not
# swap.
_HALVES: Mapping[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "MXFP4": (),
    "NVFP4": (),
    "Q1_0": (0,),
}


def swap_bytes(type_name: str, raw: np.ndarray) -> np.ndarray:
    """The stored bytes of a big-endian file with little-endian fields: uint8 [nbytes], a copy.

    Raises:
        ValueError: the type's big-endian form is not defined.
    """
    if dtype := PLAIN.get(type_name):
        return raw.view(f"u{dtype.itemsize}").byteswap().view(np.uint8)
    if type_name not in _HALVES:
        raise ValueError(f"big-endian {type_name} is not defined; convert to little-endian")
    swapped = raw.reshape(-1, BLOCKS[type_name].bytes).copy()
    for at in _HALVES[type_name]:
        swapped[:, [at, at + 1]] = swapped[:, [at + 1, at]]
    return swapped.reshape(-1)


# A decoder takes blocks, uint8 [n, bytes], and fills out, float32 [n, values]. The order of the
# floating-point operations is ggml's, so that results are the same to the last bit.
_Decoder = Callable[[np.ndarray, np.ndarray], None]


def _package_decoder(type_name: str) -> _Decoder:
    import gguf

    kind = gguf.GGMLQuantizationType[type_name]

    def decoder(blocks: np.ndarray, out: np.ndarray) -> None:
        try:
            # A single row: the package decodes 16 rows at a time.
            out[...] = gguf.quants.dequantize(blocks.reshape(1, -1), kind).reshape(out.shape)
        except NotImplementedError as error:
            raise ValueError(f"{type_name} cannot be decoded; requantize the file") from error

    return decoder


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 field at byte `at` of every block, float32 [n, 1]."""
    return blocks[:, at : at + 2].view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [n, groups, width] -> [n, groups, 2, width]: low halves, then high halves."""
    n, groups, width = packed.shape
    out = np.empty((n, groups, 2, width), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, :, 0])
    np.right_shift(packed, 4, out=out[:, :, 1])
    return out


def _bit_planes(packed: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [n, groups, width] -> [n, groups, 8 / bits, width]: every byte cut in `bits` bits."""
    planes = packed[:, :, None, :] >> np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    planes &= np.uint8((1 << bits) - 1)
    return planes


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    q = _nibbles(blocks[:, None, 2:]).reshape(out.shape)
    q -= 8
    out[...] = q.view(np.int8)
    out *= _half(blocks, 0)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = _nibbles(blocks[:, None, 4:]).reshape(out.shape)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Fifth bits uint8 [n, 4] and nibbles uint8 [n, 16] -> uint8 [n, 32]."""
    q = np.unpackbits(high, axis=1, bitorder="little")
    q <<= 4
    q |= _nibbles(low[:, None]).reshape(q.shape)
    return q


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    q = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    q -= 16
    out[...] = q.view(np.int8)
    out *= _half(blocks, 0)


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    # The last 32 bytes: Q8_1 has its values' sum before them, which only dot products need.
    out[...] = blocks[:, -32:].view(np.int8)
    out *= _half(blocks, 0)


def _q8_k(blocks: np.ndarray, out: np.ndarray) -> None:
    # After the values come 16 sums of 16, which only dot products need.
    out[...] = blocks[:, 4:260].view(np.int8)
    out *= blocks[:, :4].view("<f4")


def _q1_0(blocks: np.ndarray, out: np.ndarray) -> None:
    signs = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    signs <<= 1
    signs -= 1  # 1 or, as int8, -1
    out[...] = signs.view(np.int8)
    out *= _half(blocks, 0)


def _q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    scales = blocks[:, :16]
    out[...] = _bit_planes(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(out.shape)
    groups = out.reshape(-1, 16, 16)
    groups *= (_half(blocks, 80) * (scales & 15))[:, :, None]
    groups -= (_half(blocks, 82) * (scales >> 4))[:, :, None]


def _q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    q = _bit_planes(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(out.shape)
    high = _bit_planes(blocks[:, None, :32], 1).reshape(out.shape)
    high <<= 2
    q |= high
    q -= 4  # a set high bit means "do not subtract 4"
    out[...] = q.view(np.int8)
    groups = out.reshape(-1, 16, 16)
    groups *= (_half(blocks, 108) * q3_k_scales(blocks))[:, :, None]


def q3_k_scales(blocks: np.ndarray) -> np.ndarray:
    """The 16 scales of Q3_K, int8 [n, 16]: nibbles in 8 bytes, then bit pairs in 4, in planes."""
    scales = _nibbles(blocks[:, None, 96:104]).reshape(-1, 16)
    scales |= _bit_planes(blocks[:, None, 104:108], 2).reshape(-1, 16) << 4
    scales -= 32
    return scales.view(np.int8)


def six_bit_numbers(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The eight scales and eight minima of Q4_K and Q5_K, 6 bits each in bytes 4..16: [n, 8] twice.

    Bytes 4-7 and 8-11 hold the first four scales and minima in their low 6 bits and the top two
    bits of the last four; bytes 12-15 hold the low nibbles of the last four of both.
    """
    first, second, low = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (low & 15) | ((first >> 2) & 48)], axis=1)
    mins = np.concatenate([second & 63, (low >> 4) | ((second >> 2) & 48)], axis=1)
    return scales, mins


def _scales_and_mins(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """These numbers times d and dmin."""
    scales, mins = six_bit_numbers(blocks)
    return (_half(blocks, 0) * scales)[:, :, None], (_half(blocks, 2) * mins)[:, :, None]


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    scales, mins = _scales_and_mins(blocks)
    out[...] = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(out.shape)
    groups = out.reshape(-1, 8, 32)
    groups *= scales
    groups -= mins


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    scales, mins = _scales_and_mins(blocks)
    q = _bit_planes(blocks[:, None, 16:48], 1).reshape(out.shape)
    q <<= 4
    q |= _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(out.shape)
    out[...] = q
    groups = out.reshape(-1, 8, 32)
    groups *= scales
    groups -= mins


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    q = _bit_planes(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(out.shape)
    q <<= 4
    q |= _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(out.shape)
    q -= 32
    out[...] = q.view(np.int8)
    groups = out.reshape(-1, 16, 16)
    groups *= (_half(blocks, 208) * blocks[:, 192:208].view(np.int8))[:, :, None]


_DECODERS: Mapping[str, _Decoder] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q8_1": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_K": _q8_k,
    "Q1_0": _q1_0,
}

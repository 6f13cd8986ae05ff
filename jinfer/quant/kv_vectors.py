"""KV cache quantization: vectors of keys and values, quantized as they are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jinfer.quant.bit_packing import PIECES, unpack_four
from jinfer.quant.round_to_nearest import to_fp16
from jinfer.quant_format import QuantFormat

if TYPE_CHECKING:
    from jaxtyping import Float

BLOCK = 32  # numbers that share a scale

# Share of a block's range that its levels cover, by number of levels: with few, finer steps are
# worth more than the extremes. Optimal for normal numbers; from 16 levels the whole range is best.
RANGE_SHARE = {4: 0.73, 8: 0.91, 11: 0.95}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedVectors:
    """Vectors [*shape, width] as codes and the numbers of their blocks of 32.

    Both parts have the leading axes of the plain array: slicing, copying or permuting vectors
    applies to both alike. With p numbers in a code (2 for 3.5 bits, otherwise 1), number k of a
    vector is found by

        k = 32 * (p * column + half) + 4 * s + i,  half < p, s < 8, i < 4
        code = code s of strip i in words[..., bits * column :][:bits] (see `bit_packing`)
        q = code                                                          where p = 1
        q = code // levels for half 0, code % levels for half 1           where p = 2
        scale, base = scales[..., 2 * (k // 32) :][:2], or scale alone where there is no base

    Vectors are padded to whole columns by repeating their last number.

    Attributes:
        words: uint32 [*shape, columns * bits].
        scales: float16 [*shape, blocks * numbers].
        format: meaning of codes and numbers; its block is 32.
        width: of a vector, without padding.
    """

    words: Any
    scales: Any
    format: QuantFormat = field(metadata={"static": True})
    width: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the plain array."""
        return (*self.words.shape[:-1], self.width)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        parts = (self.words, self.scales)
        return sum(part.size * part.dtype.itemsize for part in parts)

    def dequantize(self, dtype: Any = np.float32) -> Float[Array, "*shape width"]:
        """The dequantized vectors."""
        format, lead = self.format, self.words.shape[:-1]
        codes = _unpack(self.words.reshape(*lead, -1, format.code_bits), format.code_bits)
        if format.per_code == 2:
            levels = jnp.uint8(format.levels)
            codes = jnp.stack([codes // levels, codes % levels], axis=-2)
        q = codes.reshape(*lead, -1, BLOCK).astype(jnp.float32)
        numbers = self.scales.reshape(*lead, -1, format.numbers).astype(jnp.float32)
        if format.symmetric:
            values = (q - format.zero) * numbers[..., 0, None]
        else:
            values = q * numbers[..., 0, None] + numbers[..., 1, None]
        return values.reshape(*lead, prod(q.shape[-2:]))[..., : self.width].astype(dtype)


def zero_vectors(shape: tuple[int, ...], format: QuantFormat) -> QuantizedVectors:
    """Vectors of zeros."""
    return jax.tree.map(
        lambda vectors: jnp.zeros(vectors.shape, vectors.dtype), abstract_vectors(shape, format)
    )


def abstract_vectors(shape: tuple[int, ...], format: QuantFormat) -> QuantizedVectors:
    """The shapes and types of vectors, as `jax.ShapeDtypeStruct`s."""
    if format.block != BLOCK or format.two_level or format.codebook is not None:
        raise ValueError(f"vectors are not kept as {format.name}: only plain blocks of {BLOCK}")
    *lead, width = shape
    columns = -(-width // (BLOCK * format.per_code))
    words = jax.ShapeDtypeStruct((*lead, columns * format.code_bits), np.uint32)
    numbers = jax.ShapeDtypeStruct((*lead, columns * format.per_code * format.numbers), np.float16)
    return QuantizedVectors(words, numbers, format, width)


def quantize_vectors(x: Float[Array, "*shape width"], format: QuantFormat) -> QuantizedVectors:
    """Rounds each block to the nearest codes.

    Symmetric: the value of largest magnitude becomes the first level. Otherwise the levels cover
    `RANGE_SHARE` of the block's range. A block with a NaN is NaN.
    """
    width, unit = x.shape[-1], BLOCK * format.per_code
    lead = x.shape[:-1]
    if width == 0:
        return zero_vectors(x.shape, format)
    padding = [(0, 0)] * len(lead) + [(0, -width % unit)]
    blocks = jnp.pad(x.astype(jnp.float32), padding, mode="edge").reshape(*lead, -1, BLOCK)
    low, high = jnp.min(blocks, axis=-1), jnp.max(blocks, axis=-1)
    # XLA's reductions on CPUs lose it, in arrays that are large enough to be computed in vectors.
    broken = jnp.isnan(blocks).any(axis=-1)
    low, high = (jnp.where(broken, jnp.nan, extreme_value) for extreme_value in (low, high))
    if format.symmetric:
        extreme = jnp.where(high >= -low, high, low)
        scale = to_fp16(extreme / -format.zero, jnp)
        numbers, base, offset = scale[..., None], jnp.zeros_like(low), float(format.zero)
    else:
        spread, reach = high - low, RANGE_SHARE.get(format.levels, 1.0)
        scale = to_fp16(spread * (reach / (format.levels - 1)), jnp)
        bottom = to_fp16(low + spread * ((1 - reach) / 2), jnp)
        numbers, base = jnp.stack([scale, bottom], axis=-1), bottom.astype(jnp.float32)
        offset = 0.0
    step = scale.astype(jnp.float32)
    inverse = jnp.where(step == 0, 0.0, 1 / jnp.where(step == 0, 1.0, step))
    q = jnp.round((blocks - base[..., None]) * inverse[..., None] + offset)
    codes = jnp.clip(q, 0, format.levels - 1).astype(jnp.uint8)
    codes = codes.reshape(*lead, -1, format.per_code, BLOCK)
    if format.per_code == 2:
        codes = codes[..., :1, :] * jnp.uint8(format.levels) + codes[..., 1:, :]
    words = _pack(codes[..., 0, :], format.code_bits).reshape(*lead, -1)
    return QuantizedVectors(words, numbers.reshape(*lead, -1), format, width)


def _pack(codes: Array, bits: int) -> Array:
    """uint8 [..., 32] -> uint32 [..., bits]; `jinfer.quant.bit_packing.pack` for JAX arrays."""
    fours = lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], 8, 4), jnp.uint32)
    words: list[Any] = [jnp.uint32(0)] * bits
    for s, pieces in enumerate(PIECES[bits]):
        for byte, low, width, at in pieces:
            mask = jnp.uint32(((1 << width) - 1) * 0x01010101)
            piece = ((fours[..., s] >> jnp.uint32(at)) & mask) << jnp.uint32(low)
            words[byte] = words[byte] | piece
    return jnp.stack(words, axis=-1)


def _unpack(words: Array, bits: int) -> Array:
    """uint32 [..., bits] -> uint8 [..., 32]: fewer operations than `bit_packing.unpack`."""
    fours = jnp.stack([unpack_four(words, bits, s, jnp) for s in range(8)], axis=-1)
    return lax.bitcast_convert_type(fours, jnp.uint8).reshape(*words.shape[:-1], 32)

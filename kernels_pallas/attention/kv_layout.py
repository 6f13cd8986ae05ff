"""KV cache layout in GPU kernels: keys and values as stored, and as tiles for tensor cores.

KV cache quantization: a quantized vector consists of columns of `bits` words, each with the 32
codes that `weight_layout` describes, the words of a column together. A kernel reads the half-words
h of some columns and unpacks their codes s, bytes e, in fp16 registers; the result of a load stays
together in the tile. So a tile holds the numbers of a column of 32 p in another order, which
queries are permuted to before and results permuted from after:

    tile position (half, s, e, h)  <->  number 32 half + 4 s + 2 h + e
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.matmul import unpack
from kernels_pallas.matmul.weight_layout import CODES, four_codes
from kernels_pallas.triton_ops import plt

TOKENS = 64  # of a KV cache block
BLOCK = 32  # numbers of a quantized vector that share a scale
_WIDEST = 128  # max width of a tile in registers (codes and float32)
_MOST = 640  # numbers of a vector
_MOST_PLAIN = {
    jnp.dtype(jnp.float16): _MOST,
    jnp.dtype(jnp.bfloat16): _MOST,
    jnp.dtype(jnp.float32): 256,
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedKV:
    """Keys or values of a pool: vectors [blocks, kv_heads, TOKENS, dim], plain or quantized.

    A number of code q is scale * q + base, or scale * (q - levels // 2) if blocks have no base;
    with 11 levels a code is a pair: 11 * x + y in 7 bits, p = 2 numbers, x of its column's first
    block, y of its second. The numbers of a block must stay in fp16's range.

    Attributes:
        data: float32, bfloat16 or float16 [blocks, kv_heads, TOKENS, dim]; or codes, uint32
            [blocks, kv_heads, TOKENS, columns * bits].
        scales: float16 [blocks, kv_heads, TOKENS, columns * p * numbers] of codes, by block of 32:
            its scale and, if numbers is 2, its base.
        levels: values of a code's number: 4, 8, 11, 16, 32, 64 or 256.
        width: dim of quantized vectors, without the padding of the last column.
    """

    data: Any
    scales: Any = None
    levels: int = field(default=0, metadata={"static": True})
    width: int = field(default=0, metadata={"static": True})

    @property
    def quantized(self) -> bool:
        """Whether vectors are quantized."""
        return self.levels > 0

    @property
    def dim(self) -> int:
        """Numbers of a vector (head dimension)."""
        return self.width if self.quantized else int(self.data.shape[-1])

    @property
    def per_code(self) -> int:
        """p: numbers per code."""
        return 2 if self.levels == 11 else 1

    @property
    def unit(self) -> int:
        """Numbers per column."""
        return BLOCK * self.per_code if self.quantized else 1

    @property
    def padded(self) -> int:
        """Numbers of a vector in the tiles, with padding of the last column."""
        return self.columns * self.unit

    @property
    def columns(self) -> int:
        """Columns of a vector; a plain one has one per number."""
        return -(-self.dim // self.unit)

    @property
    def bits(self) -> int:
        """Bits of a code: words per column."""
        return int(self.data.shape[-1]) // self.columns

    @property
    def numbers(self) -> int:
        """Numbers per block: its scale, and its base if it has one."""
        return int(self.scales.shape[-1]) // (self.columns * self.per_code)

    @property
    def arrays(self) -> int:
        """Number of `operands`."""
        return 2 if self.quantized else 1

    @property
    def tile_type(self) -> Any:
        """Number type of the tiles."""
        return jnp.float16 if self.quantized else self.data.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(self))

    @property
    def tiled(self) -> bool:
        """Whether the kernel supports such vectors: tensor cores need multiples of 16.

        Float32 has no tensor cores, and a whole vector must fit into registers or shared memory.
        """
        if self.quantized:
            return self.dim <= _MOST
        kind = jnp.dtype(self.data.dtype)
        return self.dim % 16 == 0 and self.dim <= _MOST_PLAIN.get(kind, 0)

    def pieces(self) -> list[tuple[int, int]]:
        """Returns (first, count) of the columns of each tile; counts are powers of two."""
        narrow = self.quantized or self.tile_type == jnp.float32
        columns_at_once = _WIDEST // self.unit if narrow else self.columns
        pieces, first = [], 0
        while first < self.columns:
            count = 1 << (min(columns_at_once, self.columns - first).bit_length() - 1)
            pieces.append((first, count))
            first += count
        return pieces

    def spans(self) -> list[tuple[int, int]]:
        """Returns (first, count) of the numbers of each tile."""
        return [(first * self.unit, count * self.unit) for first, count in self.pieces()]

    def operands(self) -> list[Array]:
        """Returns the arrays as kernel operands."""
        if not self.quantized:
            return [self.data]
        lead = self.data.shape[:3]
        half_words = lax.bitcast_convert_type(self.data, jnp.uint16)
        return [
            half_words.reshape(*lead, self.columns, self.bits, 2),
            self.scales.reshape(*lead, self.columns, self.per_code, self.numbers),
        ]

    def to_tile_order(self, x: Array) -> Array:
        """Permutes vectors [..., dim] to the order of the tiles, padded with zeros."""
        if not self.quantized:
            return x
        lead = x.shape[:-1]
        padding = [(0, 0)] * len(lead) + [(0, self.padded - self.dim)]
        return _swap_pairs(jnp.pad(x, padding))

    def from_tile_order(self, x: Array) -> Array:
        """Inverts `arranged`."""
        if not self.quantized:
            return x
        return _swap_pairs(x)[..., : self.dim]

    def dequantized(self) -> Array:
        """Dequantizes the vectors to float32."""
        if not self.quantized:
            return jnp.asarray(self.data).astype(jnp.float32)
        lead = self.data.shape[:3]
        words = jnp.asarray(self.data).reshape(*lead, self.columns, self.bits)
        words = jnp.moveaxis(words, -1, 0)
        four = jnp.stack([four_codes(words, s) for s in range(CODES)], axis=-1)
        codes = lax.bitcast_convert_type(four, jnp.uint8).reshape(*lead, self.columns, BLOCK)
        if self.per_code == 2:
            levels = jnp.uint8(self.levels)
            codes = jnp.stack([codes // levels, codes % levels], axis=-2)
        q = codes.astype(jnp.float32).reshape(*lead, -1, BLOCK)
        numbers = self.scales.astype(jnp.float32).reshape(*lead, -1, self.numbers)
        if self.numbers == 1:
            values = (q - self.levels // 2) * numbers
        else:
            values = q * numbers[..., :1] + numbers[..., 1:]
        return values.reshape(*lead, self.padded)[..., : self.dim]


def load_tiles(
    kept: PackedKV, refs: Sequence[Any], where: tuple[Any, Any, Any], there: Array, *, asm: bool
) -> list[Array]:
    """Loads keys or values in a kernel: a tile [keys, numbers] for each of `kept.spans()`.

    Args:
        refs: of `kept.operands()`.
        where: block, head and slice of its keys.
        there: bool [keys], the mask of keys to read; the others become finite numbers.
        asm: as for `unpack`.
    """
    if kept.quantized:
        return [
            _dequantized(kept, refs, (*where, pl.ds(*piece)), there, asm) for piece in kept.pieces()
        ]
    return [_read(refs[0], (*where, pl.ds(*piece)), there) for piece in kept.pieces()]


def _dequantized(
    kept: PackedKV, refs: Sequence[Any], where: tuple[Any, ...], there: Array, asm: bool
) -> Array:
    """Dequantizes the tile of some columns to fp16, [keys, 32 p columns]."""
    half_words, scales = refs
    keys, columns = there.shape[0], where[-1].size
    shape = (keys, 2 * columns)
    every = pl.ds(0, 2)
    words = [
        _read(half_words, (*where, jnp.int32(t), every), there).reshape(shape)
        for t in range(kept.bits)
    ]

    def of_half_words(number: Array) -> Array:
        full = lax.broadcast_in_dim(number.reshape(keys, columns), (keys, columns, 2), (0, 1))
        return full.reshape(shape)

    blocks = []
    for half in range(kept.per_code):
        pair = _read(scales, (*where, jnp.int32(half), pl.ds(0, kept.numbers)), there)
        scale, *base = map(of_half_words, lax.split(pair, (1,) * kept.numbers, axis=2))
        zero = -float(kept.levels // 2)
        plus = base[0] if base else unpack.fma_by(scale, zero, 0.0, asm=asm)
        blocks.append((scale, plus))
    slices: list[list[Array]] = [[] for _ in blocks]
    for _, _, f in unpack.fractions(words, kept.bits, asm=asm):
        for into, numbers in zip(
            slices, _dequantize_fraction(f, blocks, kept.levels, asm), strict=True
        ):
            into.append(numbers)
    return _joined([part for half in slices for part in half], columns)


def _dequantize_fraction(
    f: Array, blocks: Sequence[tuple[Array, Array]], levels: int, asm: bool
) -> list[Array]:
    """Dequantizes a fraction with its blocks' scale and base: multiply-add of exact codes.

    `unpack.prepare_scales` saves an instruction for codes of few bits, but rounds a number that a
    whole block shares, which would bias a key's 32 products alike.
    """
    scale, base = blocks[0]
    if levels == 11:  # a first code of 0 reads as 16
        ones, minus = (jnp.full(f.shape, value, jnp.float16) for value in (1, -16))
        known = [unpack.ScaleAndBase(ones, minus), unpack.ScaleAndBase(*blocks[1])]
        first, second = unpack.weights(f, known, levels, asm=asm)
        return [unpack.fma(first, scale, base, asm=asm), second]
    if levels < 32:
        q = unpack.fma_by(f, float(levels), -float(levels), asm=asm)
        return [unpack.fma(q, scale, base, asm=asm)]
    return unpack.weights(f, [unpack.ScaleAndBase(scale, base)], levels, asm=asm)


def _joined(tiles: list[Array], columns: int) -> Array:
    """Joins tiles [keys, 2 columns] into one tile; their number is a power of two."""
    keys, count = tiles[0].shape[0], len(tiles)
    while len(tiles) > 1:
        half = len(tiles) // 2
        pairs = zip(tiles[:half], tiles[half:], strict=True)
        tiles = [jnp.stack(pair, axis=-1).reshape(keys, -1) for pair in pairs]
    # Half-words that share a register stay together; repacking them would be slower.
    tile = tiles[0].reshape(keys, columns, 2, count).transpose(0, 1, 3, 2)
    return tile.reshape(keys, -1)


def _read(ref: Any, where: tuple[Any, ...], there: Array) -> Array:
    shape = tuple(part.size for part in where if isinstance(part, pl.Slice))
    mask = lax.broadcast_in_dim(there, shape, (0,))
    return plt.load(ref.at[where], mask=mask, other=np.zeros((), ref.dtype))


def _swap_pairs(x: Array) -> Array:
    """Swaps h and e in every four numbers (its own inverse)."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2, 2), -1, -2).reshape(x.shape)

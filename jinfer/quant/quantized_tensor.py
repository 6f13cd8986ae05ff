"""Quantized tensors: the memory layout of block-quantized matrices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.quant.bit_packing import pack, unpack
from jinfer.quant_format import QuantFormat

if TYPE_CHECKING:
    from jaxtyping import Float, Int

LANES = 16  # words of the widest CPU vector
MAX_COLUMNS = 32  # of a superblock: what the GPU kernels read
type Activations = Literal["int8", "int16", "float", "bf16"]

SUPER = 256  # weights that share the second-level numbers of a two-level format
ALIGNMENT = 64  # bytes, of an array that XLA:CPU takes over
_CHECKED_BYTES = 1 << 20  # copied at a time, to be checked in the L2 cache
CHUNK = 1 << 19  # weights packed at a time: temporaries stay in the L2 cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized matrix [outputs, inputs], or a stack of them: codes and block numbers.

    A *column* is 32 codes of one row in `bits` words (see `bit_packing`). G columns of a row are a
    superblock, and R rows form a tile, so that R * G >= 16: a vector of 16 words is one word of
    each of 16 columns. With p weights in a code (2 for 3.5 bits, otherwise 1), the weight of row n
    and input k is found by

        n = R * tile + r
        k = 32 * (G * (p * superblock + half) + g) + 4 * s + i,  half < p, g < G, s < 8, i < 4
        code = code s of strip i in words[tile, superblock, :, r, g]
        q = code                                                          where p = 1
        q = code // levels for half 0, code % levels for half 1           where p = 2
        numbers = scales[tile, superblock, r, (k // block) % S],  S = 32 * G * p / block

    If a block is wider than that, S is 1, and superblock // (block / (32 * G * p)) takes the place
    of superblock.

    Rows are padded to a multiple of R, inputs to a multiple of 32 * p and of the block; activations
    are 0 where inputs are padded.

    Attributes:
        words: uint32 [*stack, tiles, superblocks, bits, R, G].
        scales: [*stack, tiles, superblocks or blocks, R, S, numbers]: scale and base in float16, or
            s and m in int8 if the format is two-level.
        steps: float16 [*stack, tiles, superblocks, R, 32 * G * p / 256, numbers], step and floor,
            if the format is two-level.
        format: meaning of codes and numbers.
        outputs, inputs: without padding.
        activations: precision of activations in CPU matmuls: "int8" and "int16" round them to so
            many bits in blocks of 32, "float" keeps float32's 24; "bf16": see matmul_call.py.
    """

    words: Any
    scales: Any
    steps: Any | None
    format: QuantFormat = field(metadata={"static": True})
    outputs: int = field(metadata={"static": True})
    inputs: int = field(metadata={"static": True})
    activations: Activations = field(default="int8", metadata={"static": True})

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading axes: experts."""
        return tuple(self.words.shape[:-5])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, without padding."""
        return (*self.stack, self.outputs, self.inputs)

    @property
    def rows(self) -> int:
        """R: rows of a tile."""
        return int(self.words.shape[-2])

    @property
    def columns(self) -> int:
        """G: columns of a superblock."""
        return int(self.words.shape[-1])

    @property
    def padded_inputs(self) -> int:
        """Inputs with padding."""
        return int(self.words.shape[-4]) * 32 * self.format.per_code * self.columns

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        parts = (self.words, self.scales, self.steps)
        return sum(part.size * part.dtype.itemsize for part in parts if part is not None)

    def __getitem__(self, index: Any) -> QuantizedTensor:
        """Returns a matrix of a stack; `...`: the tensor itself."""
        if index is Ellipsis:
            return self
        if not self.stack:
            raise IndexError("a single matrix has no stack to choose from; use take for rows")
        return jax.tree.map(lambda part: part[index], self)

    def dequantize(self, dtype: Any = np.float32) -> Float[Array, "*stack outputs inputs"]:
        """Dequantizes the matrix: the reference for every kernel.

        NumPy arrays are dequantized by NumPy, without compiling anything.
        """
        return _dequantize(self, np if isinstance(self.words, np.ndarray) else jnp).astype(dtype)

    def take(self, rows: Int[Array, "*shape"], dtype: Any) -> Float[Array, "*shape inputs"]:
        """Looks up embeddings: dequantized rows of the matrix."""
        flat = rows.reshape(-1)
        tile, row = flat // self.rows, flat % self.rows
        # Tiles of one row, cut out of [tiles, superblocks, bits, R, G] and [..., R, S, numbers].
        words = self.words[tile, :, :, row][:, :, :, None]
        scales = self.scales[tile, :, row][:, :, None]
        steps = None if self.steps is None else self.steps[tile, :, row][:, :, None]
        size = (flat.size, self.inputs)
        selected = QuantizedTensor(words, scales, steps, self.format, *size).dequantize(dtype)
        return selected.reshape(*rows.shape, self.inputs)


def columns_of(format: QuantFormat) -> int:
    """G on a CPU: 2, or as many columns as share the numbers of a two-level format.

    Few columns, so that a vector holds as many rows as possible.
    """
    return SUPER // 32 if format.two_level else 2


def pad_inputs(inputs: int, format: QuantFormat) -> int:
    """Padded inputs: a multiple of the block and of a column's weights.

    Two-level formats are padded to a multiple of 256.
    """
    unit = max(format.block, 32 * format.per_code, SUPER if format.two_level else 0)
    return -(-inputs // unit) * unit


def from_codes(
    codes: np.ndarray,
    scales: np.ndarray,
    format: QuantFormat,
    *,
    steps: np.ndarray | None = None,
    columns: int | None = None,
) -> QuantizedTensor:
    """Packs codes and block numbers.

    Args:
        codes: uint8, or uint16 for 16-bit codes, [*stack, outputs, inputs], below `format.levels`.
        scales: [*stack, outputs, ceil(inputs / block), numbers].
        steps: [*stack, outputs, ceil(inputs / 256), numbers], for two-level formats.
        columns: G, if not that of `columns_of`; inputs are padded to fill superblocks.

    Returns:
        A tensor of NumPy arrays.
    """
    *stack, outputs, inputs = codes.shape
    tensor = empty_tensor(codes.shape, format, columns)
    g, p = tensor.columns, format.per_code
    height = max(1, CHUNK // (tensor.rows * tensor.padded_inputs)) * tensor.rows
    padding = format.zero if format.code_bits == 16 else 0
    for index in np.ndindex(*stack):
        for begin in range(0, outputs, height):
            rows = slice(begin, min(begin + height, outputs))
            part = np.full((rows.stop - begin, tensor.padded_inputs), padding, codes.dtype)
            part[:, :inputs] = codes[(*index, rows)]
            if p == 2:
                halves = part.reshape(len(part), -1, 2, 32 * g)
                part = halves[:, :, 0] * np.uint8(format.levels) + halves[:, :, 1]
            words = np.moveaxis(pack(part.reshape(len(part), -1, 32), format.code_bits), -1, 0)
            second = None if steps is None else steps[(*index, rows)]
            fill_rows(tensor[index or ...], begin, words, scales[(*index, rows)], second)
    return tensor


def empty_tensor(
    shape: tuple[int, ...], format: QuantFormat, columns: int | None = None
) -> QuantizedTensor:
    """Makes a tensor of zeros in NumPy arrays, for `fill_rows`.

    The arrays are aligned as XLA requires, so that `jax.device_put` to a CPU makes no copy: they
    must not be written to afterwards.
    """
    return jax.tree.map(_zeros, abstract(shape, format, columns))


class _HugePageAllocator:
    """Allocates zeros from large regions of memory, which the kernel backs with huge pages.

    A matrix of a small model is smaller than a huge page; in 4 KiB pages its weights are read
    slower, because of TLB misses and because prefetching stops at page ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slab = np.zeros(0, np.uint8)
        self._begin = 0

    def take(self, size: int) -> np.ndarray:
        """uint8 [size], aligned; the slab lives as long as any part of it."""
        if size > _SLAB:
            return _whole_pages(size)
        with self._lock:
            if self._begin + size > self._slab.size:
                self._slab, self._begin = _whole_pages(_SLAB), 0
            begin = self._begin
            self._begin += -(-size // ALIGNMENT) * ALIGNMENT
            return self._slab[begin : begin + size]


# A slab stays allocated as long as any matrix in it. Untouched parts take no memory.
_SLAB, _HUGE_PAGE = 16 << 20, 2 << 20
_slabs = _HugePageAllocator()


def copy_to_huge_pages(
    values: np.ndarray, dtype: Any = None, check: Callable[[np.ndarray], object] | None = None
) -> np.ndarray:
    """Copy an array to huge pages, for arrays that are read again and again, such as weights.

    Args:
        dtype: of the copy; None: the same.
        check: called with each piece of the copy, 1-D, while the piece is in the CPU's cache.
    """
    source = np.ascontiguousarray(values).reshape(-1)
    dtype = np.dtype(values.dtype if dtype is None else dtype)
    copy = _slabs.take(values.size * dtype.itemsize).view(dtype)
    step = copy.size if check is None else _CHECKED_BYTES // dtype.itemsize
    for begin in range(0, copy.size, max(1, step)):
        piece = copy[begin : begin + step]
        piece[...] = source[begin : begin + step]
        if check is not None:
            check(piece)
    return copy.reshape(values.shape)


def _whole_pages(size: int) -> np.ndarray:
    """Allocates zeros aligned to a huge page; the memory before them is never touched."""
    buffer = np.zeros(size + _HUGE_PAGE, np.uint8)
    return buffer[-buffer.ctypes.data % _HUGE_PAGE :][:size]


def _zeros(like: jax.ShapeDtypeStruct) -> np.ndarray:
    buffer = _slabs.take(like.size * like.dtype.itemsize)
    return buffer.view(like.dtype).reshape(like.shape)


def fill_rows(
    tensor: QuantizedTensor,
    begin: int,
    words: np.ndarray,
    scales: np.ndarray,
    steps: np.ndarray | None = None,
) -> None:
    """Writes rows of a matrix that `empty_tensor` made.

    Args:
        begin: the first row, a multiple of R.
        words: uint32 [bits, rows, columns], the words of each row's columns from the first.
        scales: [rows, blocks, numbers] from each row's first block.
        steps: [rows, blocks of 256, numbers], for two-level formats.
    """
    first = begin // tensor.rows
    words, tiles = np.ascontiguousarray(words), tensor.words[first:]
    if words.shape[-1] % 2 == tensor.columns % 2 == 0:  # in pairs: NumPy is slow with short axes
        words, tiles = words.view(np.uint64), tiles.view(np.uint64)
    _place(tiles.transpose(0, 3, 1, 4, 2), np.moveaxis(words, 0, -1))
    for target, numbers in ((tensor.scales, scales), (tensor.steps, steps)):
        if target is not None:
            numbers = np.ascontiguousarray(numbers, target.dtype)
            _place(_joined(target[first:]).swapaxes(1, 2), _joined(numbers))


def _joined(numbers: np.ndarray) -> np.ndarray:
    """Views the numbers of a block as one element: [..., numbers] -> [..., 1]."""
    return numbers.view(f"u{numbers.shape[-1] * numbers.itemsize}")


def _place(tiles: np.ndarray, rows: np.ndarray) -> None:
    """Copies [rows, each, n] to the first tiles of [tiles, R, superblocks, share, n]."""
    height, superblocks, share = tiles.shape[1:4]
    rows = rows[:, : superblocks * share]  # padding may differ from the source's
    if missing := superblocks * share - rows.shape[1]:
        rows = np.pad(rows, [(0, 0), (0, missing), (0, 0)])
    rows = rows.reshape(len(rows), superblocks, share, -1)
    whole, rest = divmod(len(rows), height)
    tiles[:whole] = rows[: whole * height].reshape(whole, height, *rows.shape[1:])
    if rest:
        tiles[whole, :rest] = rows[whole * height :]


def to_codes(tensor: QuantizedTensor) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Inverts `from_codes`: codes, numbers, steps; inputs stay padded."""
    host = jax.tree.map(np.asarray, tensor)
    kind = np.uint16 if tensor.format.code_bits == 16 else np.uint8
    codes = _codes(host, np)[..., : tensor.outputs, :].astype(kind)
    scales = _rows_first(host.scales)[..., : tensor.outputs, :, :]
    steps = None if host.steps is None else _rows_first(host.steps)[..., : tensor.outputs, :, :]
    return codes, scales, steps


def with_columns(tensor: QuantizedTensor, columns: int) -> QuantizedTensor:
    """Converts the matrix to superblocks of another size, as a back end may require."""
    if tensor.columns == columns:
        return tensor
    codes, scales, steps = to_codes(tensor)
    codes = codes[..., : tensor.inputs]
    return from_codes(codes, scales, tensor.format, steps=steps, columns=columns)


def abstract(
    shape: tuple[int, ...], format: QuantFormat, columns: int | None = None
) -> QuantizedTensor:
    """Returns a tensor of `jax.ShapeDtypeStruct`s: the result of `from_codes` for this shape.

    Raises:
        ValueError: with so few columns there is no space for the steps of a two-level format.
    """
    return _abstract(tuple(shape), format, columns or columns_of(format))


@lru_cache  # a model has hundreds of matrices, of few shapes
def _abstract(shape: tuple[int, ...], format: QuantFormat, columns: int) -> QuantizedTensor:
    *stack, outputs, inputs = shape
    p, g = format.per_code, columns
    width, r = 32 * p * g, max(1, LANES // g)
    if format.two_level and width % SUPER:
        raise ValueError(f"superblocks of {width} weights are not whole blocks of {SUPER}")
    tiles, superblocks = -(-outputs // r), -(-pad_inputs(inputs, format) // width)
    lead = (*stack, tiles, superblocks)
    kind = np.int8 if format.two_level else np.float16
    steps = jax.ShapeDtypeStruct((*lead, r, width // SUPER, format.numbers), np.float16)
    share = max(1, format.block // width)  # superblocks of a block
    blocks = (*stack, tiles, superblocks // share, r, max(1, width // format.block))
    return QuantizedTensor(
        jax.ShapeDtypeStruct((*lead, format.code_bits, r, g), np.uint32),
        jax.ShapeDtypeStruct((*blocks, format.numbers), kind),
        steps if format.two_level else None,
        format,
        outputs,
        inputs,
    )


def block_numbers(tensor: QuantizedTensor, xp: ModuleType = jnp) -> tuple[Any, Any | None]:
    """Returns scale and base (None: symmetric) of each block, [*stack, outputs, blocks], padded."""
    numbers = _rows_first(tensor.scales).astype(xp.float32)
    if tensor.steps is not None:
        times = SUPER // tensor.format.block
        numbers = numbers * xp.repeat(_rows_first(tensor.steps).astype(xp.float32), times, axis=-2)
    return numbers[..., 0], None if tensor.format.symmetric else numbers[..., 1]


def _rows_first(part: Any) -> Any:
    """[*stack, tiles, superblocks, R, S, numbers] -> [*stack, outputs, blocks, numbers]."""
    *stack, tiles, superblocks, rows, s, numbers = part.shape
    return part.swapaxes(-4, -3).reshape(*stack, tiles * rows, superblocks * s, numbers)


def _codes(tensor: QuantizedTensor, xp: ModuleType) -> Any:
    """Returns every weight's code q, padding included: [*stack, rows, inputs]."""
    format = tensor.format
    *stack, tiles, superblocks, bits, rows, columns = tensor.words.shape
    codes = unpack(xp.moveaxis(tensor.words, -3, -1), bits, xp)  # [..., superblocks, R, G, 32]
    if format.per_code == 2:
        levels = xp.uint32(format.levels)
        codes = xp.stack([codes // levels, codes % levels], axis=-3)
    lead = len(stack)
    codes = xp.moveaxis(codes, lead + 2, lead + 1)  # R before the superblocks
    return codes.reshape(*stack, tiles * rows, superblocks * format.per_code * columns * 32)


def _dequantize(tensor: QuantizedTensor, xp: ModuleType) -> Any:
    format = tensor.format
    codes = _codes(tensor, xp)
    if format.codebook is not None:
        q = xp.asarray(format.codebook, xp.float32)[codes]
    else:
        q = codes.astype(xp.float32) - xp.float32(format.zero if format.symmetric else 0)
    scale, base = block_numbers(tensor, xp)
    blocks = q.reshape(*q.shape[:-1], -1, format.block) * scale[..., None]
    if base is not None:
        blocks = blocks + base[..., None]
    return blocks.reshape(q.shape)[..., : tensor.outputs, : tensor.inputs]

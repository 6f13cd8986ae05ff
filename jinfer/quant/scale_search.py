"""Scale search (MSE): block scales and bases of least squared error, weighted by importance.

The extremes of a block are a bad guide at few bits: a somewhat narrower range clips them and serves
all other weights. So ranges that end near the extremes are tried. For the codes of a range, the
best scale and base are those of weighted least squares, in closed form; the range whose codes allow
the least error is refined by alternating rounding and fitting. If rounding to nearest is better in
the end, its result is used.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jinfer.quant.round_to_nearest import (
    codes_of,
    largest_level,
    nearest_levels,
    split_into_blocks,
    to_fp16,
)
from jinfer.quant_format import QuantFormat

if TYPE_CHECKING:
    from jaxtyping import Float

# How far a range extends beyond the extremes, in steps; affine: at each end.
_AFFINE = (-1.2, -0.7, -0.2, 0.3)
_SYMMETRIC = tuple(float(x) for x in np.linspace(-1.2, 1.2, 13))
_TABLE = _SYMMETRIC[1:-1:2]  # rounding to a table takes longer, and fewer ranges lose nothing
_REFITS = 2
_CHUNK = 1 << 18  # weights per call: they stay in the L2 cache while all ranges are tried
_FEWEST = 256  # blocks per call
_LEAST = 1e-4  # minimal importance of a weight, relative to its block's mean


def search_scales(
    values: np.ndarray, format: QuantFormat, importance: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Finds codes, scales and bases of small sum of importance * (value - dequantized value)**2.

    Thread-safe.

    Args:
        values: float32 [..., inputs].
        importance: importance of each input (imatrix), not negative: [inputs]. None: all equal.

    Returns:
        uint8 [..., blocks, block], float16 [..., blocks] twice; no bases if the format is
        symmetric.
    """
    block, inputs = format.block, values.shape[-1]
    blocks = split_into_blocks(values, block)
    flat = blocks.reshape(-1, block)
    weights = None
    if importance is not None or inputs % block:
        weights = block_weights(np.ones(inputs) if importance is None else importance, block)
    size = min(max(1, _CHUNK // block), max(_FEWEST, 1 << (len(flat) - 1).bit_length()))
    codes = np.empty(flat.shape, np.uint8)
    scale, base = np.empty(len(flat), np.float16), np.empty(len(flat), np.float16)
    for begin in range(0, len(flat), size):
        # The last chunk begins earlier, so that all have the same size.
        start = max(0, min(begin, len(flat) - size))
        part = slice(start, min(start + size, len(flat)))
        x = flat[part]
        w = None if weights is None else weights[np.arange(start, part.stop) % len(weights)]
        if missing := size - len(x):
            x = np.pad(x, ((0, missing), (0, 0)))
            w = None if w is None else np.pad(w, ((0, missing), (0, 0)), constant_values=1)
        found = _search(_lanes(x), None if w is None else _lanes(w), format)
        count = part.stop - start
        codes[part] = np.asarray(found.codes)[:count]
        scale[part], base[part] = np.asarray(found.scale)[:count], np.asarray(found.base)[:count]
    shape = blocks.shape[:-1]
    bases = None if format.symmetric else base.reshape(shape)
    return codes.reshape(blocks.shape), scale.reshape(shape), bases


def block_weights(importance: np.ndarray, block: int) -> np.ndarray:
    """Returns each weight's importance, about 1 on average, 0 for padding: [blocks, block]."""
    inputs = len(importance)
    filled = importance.astype(np.float32)
    weights = np.pad(filled, (0, -inputs % block)).reshape(-1, block)
    mean = weights.mean(axis=1, keepdims=True)
    weights = np.where(mean > 0, weights / np.where(mean > 0, mean, 1), 1)
    weights = np.maximum(weights, np.float32(_LEAST))
    weights.reshape(-1)[inputs:] = 0
    return weights


def _lanes(blocks: np.ndarray) -> np.ndarray:
    """[n, block] -> [block, n], so that sums over a block are vectorized."""
    return np.ascontiguousarray(blocks.T)


class _SearchResult(NamedTuple):
    codes: Array  # uint8 [n, block]
    scale: Array  # float16 [n]
    base: Array  # float16 [n]


type _PerBlock = Float[Array, " n"]
type _PerWeight = Float[Array, "block n"]


@partial(jax.jit, static_argnums=2)
def numbers(
    x: _PerWeight, w: Float[Array, "block some"] | None, format: QuantFormat
) -> tuple[_PerBlock, _PerBlock]:
    """Finds scales and bases of small error per block, float16; bases are 0 if symmetric."""
    return _numbers(_blocks(x, w, format))


def dequantized(x: Array, scale: Array, base: Array, format: QuantFormat) -> Array:
    """Dequantizes the nearest levels of blocks; scale and base are float32."""
    return nearest_levels((x - base) * _inverse(scale), format, jnp) * scale + base


@partial(jax.jit, static_argnums=2)
def _search(x: _PerWeight, w: _PerWeight | None, format: QuantFormat) -> _SearchResult:
    blocks = _blocks(x, w, format)
    scale, base = _numbers(blocks)
    q = codes_of(blocks.levels(scale.astype(jnp.float32), base.astype(jnp.float32)), format, jnp)
    # The transposition must not be fused into the rounding loop.
    q = lax.optimization_barrier(q.astype(jnp.uint8)).T
    return _SearchResult(q, scale, base)


def _blocks(x: _PerWeight, w: Array | None, format: QuantFormat) -> _Affine | _Symmetric:
    return _Symmetric(x, w, format) if format.symmetric else _Affine(x, w, format)


def _numbers(blocks: _Affine | _Symmetric) -> tuple[_PerBlock, _PerBlock]:
    ranges = jnp.asarray(blocks.ranges, jnp.float32)
    zeros = jnp.zeros_like(blocks.x[0])

    def attempt(i: Array, best: tuple[_PerBlock, ...]) -> tuple[_PerBlock, ...]:
        gain, scale, base = blocks.fit(*blocks.numbers(ranges[i]))
        better = gain > best[0]
        new = (gain, scale, base)
        return tuple(jnp.where(better, n, old) for n, old in zip(new, best, strict=True))

    # A loop, because XLA takes seconds to compile it unrolled.
    _, scale, base = lax.fori_loop(0, len(blocks.ranges), attempt, (zeros - 1, zeros, zeros))
    for _ in range(_REFITS):
        _, scale, base = blocks.fit(scale, base)
    scale = _stored(scale)
    base = _stored(blocks.base_for(scale, base))
    nearest_scale, nearest_base = map(_stored, blocks.nearest())
    error = blocks.error(scale, base)
    better = error < blocks.error(nearest_scale, nearest_base)
    scale = jnp.where(better, scale, nearest_scale)
    base = jnp.where(better, base, nearest_base)
    return scale.astype(jnp.float16), base.astype(jnp.float16)


class _BlockSearch:
    """Blocks [block, n] to be quantized; levels are float32, base is 0 if symmetric."""

    ranges: tuple[tuple[float, ...], ...]

    def __init__(self, x: _PerWeight, w: Array | None, format: QuantFormat) -> None:
        self.x, self.w, self.format = x, w, format

    def sum(self, numbers: _PerWeight) -> _PerBlock:
        """Computes the weighted sum over each block."""
        return jnp.sum(numbers if self.w is None else numbers * self.w, axis=0)

    def levels(self, scale: _PerBlock, base: _PerBlock) -> _PerWeight:
        """Rounds to the nearest levels."""
        return nearest_levels((self.x - base[None]) * _inverse(scale)[None], self.format, jnp)

    def error(self, scale: _PerBlock, base: _PerBlock) -> _PerBlock:
        """Computes the weighted sum of squared errors."""
        left = self.levels(scale, base) * scale[None] + base[None] - self.x
        return self.sum(left * left)


class _Affine(_BlockSearch):
    def __init__(self, x: _PerWeight, w: Array | None, format: QuantFormat) -> None:
        super().__init__(x, w, format)
        self.low, self.high = jnp.min(x, axis=0), jnp.max(x, axis=0)
        self.middle, self.width = 0.5 * (self.low + self.high), self.high - self.low
        self.weight = self.sum(jnp.ones_like(x))
        # Centered numbers lose less precision in sums of products.
        self.around = x - self.middle[None]
        self.total = self.sum(self.around)
        widths = [steps / (format.levels - 1) for steps in _AFFINE]
        self.ranges = tuple(product(widths, widths))

    def nearest(self) -> tuple[_PerBlock, _PerBlock]:
        return self.width / (self.format.levels - 1), self.low

    def numbers(self, beyond: Array) -> tuple[_PerBlock, _PerBlock]:
        width = self.width * (1 + beyond[0] + beyond[1])
        return width / (self.format.levels - 1), self.low - self.width * beyond[0]

    def fit(self, scale: _PerBlock, base: _PerBlock) -> tuple[_PerBlock, _PerBlock, _PerBlock]:
        """Returns the error reduction, and the best numbers for the codes of these numbers."""
        middle = 0.5 * (self.format.levels - 1)
        q = self.levels(scale, base) - middle
        mean = self.sum(q) / self.weight
        variance = self.sum(q * q) - mean * mean * self.weight
        covariance = self.sum(q * self.around) - mean * self.total
        scale = jnp.where(variance > 0, covariance / jnp.where(variance > 0, variance, 1), 0)
        base = self.middle + self.total / self.weight - scale * (mean + middle)
        return scale * covariance, scale, base

    def base_for(self, scale: _PerBlock, base: _PerBlock) -> _PerBlock:
        """Returns the best base for a rounded scale."""
        return self.sum(self.x - scale[None] * self.levels(scale, base)) / self.weight


class _Symmetric(_BlockSearch):
    def __init__(self, x: _PerWeight, w: Array | None, format: QuantFormat) -> None:
        super().__init__(x, w, format)
        low, high = jnp.min(x, axis=0), jnp.max(x, axis=0)
        self.extreme = jnp.where(high > -low, high, low)
        tried = _SYMMETRIC if format.codebook is None else _TABLE
        ranges = [1 + steps / format.zero for steps in tried]
        if format.levels % 2 == 0:  # an odd number of levels is the same from both sides
            ranges += [-span for span in ranges]
        self.ranges = tuple((span,) for span in ranges)

    def nearest(self) -> tuple[_PerBlock, _PerBlock]:
        return self.extreme / largest_level(self.format), jnp.zeros_like(self.extreme)

    def numbers(self, share: Array) -> tuple[_PerBlock, _PerBlock]:
        scale, base = self.nearest()
        return scale * share[0], base

    def fit(self, scale: _PerBlock, base: _PerBlock) -> tuple[_PerBlock, _PerBlock, _PerBlock]:
        q = self.levels(scale, base)
        squares, products = self.sum(q * q), self.sum(q * self.x)
        scale = jnp.where(squares > 0, products / jnp.where(squares > 0, squares, 1), 0)
        return scale * products, scale, base

    def base_for(self, scale: _PerBlock, base: _PerBlock) -> _PerBlock:
        return base


def _inverse(scale: _PerBlock) -> _PerBlock:
    return jnp.where(scale != 0, 1 / jnp.where(scale != 0, scale, 1), 0)


def _stored(number: _PerBlock) -> _PerBlock:
    """Rounds to float16."""
    return to_fp16(number, jnp).astype(jnp.float32)

"""Round to nearest (RTN): the plain quantizer, and the levels of codes."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from jinfer.quant_format import QuantFormat


def largest_level(format: QuantFormat) -> int:
    """Returns the level of largest magnitude of a format without bases."""
    return -format.zero if format.codebook is None else max(format.codebook, key=abs)


def nearest_levels(x: Any, format: QuantFormat, xp: ModuleType = np) -> Any:
    """Returns the nearest level of each number, in units of the scale.

    Args:
        xp: numpy, or jax.numpy for JAX arrays.
    """
    if format.codebook is None:
        least = -format.zero if format.symmetric else 0
        return xp.clip(xp.round(x), least, least + format.levels - 1)
    if xp is np:
        return levels_of(_codes(x, format.codebook), format)
    # One comparison at a time: XLA:CPU vectorizes it, unlike a gather.
    level = xp.full_like(x, format.codebook[0])
    for low, high in pairwise(format.codebook):
        level = xp.where(x > 0.5 * (low + high), np.float32(high), level)
    return level


def codes_of(levels: Any, format: QuantFormat, xp: ModuleType = np) -> Any:
    """Returns the codes of levels, in the same type."""
    if format.codebook is None:
        return levels + format.zero if format.symmetric else levels
    return _codes(levels, format.codebook, xp).astype(levels.dtype)


def _codes(x: Any, table: tuple[int, ...], xp: ModuleType = np) -> Any:
    """Returns the codes of the nearest levels, uint8: NumPy counts faster than it searches."""
    codes = xp.zeros_like(x, np.uint8)
    for low, high in pairwise(table):
        codes = codes + (x > 0.5 * (low + high)).astype(np.uint8)
    return codes


def levels_of(codes: np.ndarray, format: QuantFormat) -> np.ndarray:
    """Returns the levels of codes, float32."""
    if format.codebook is not None:
        return np.array(format.codebook, np.float32)[codes]
    return codes.astype(np.float32) - np.float32(format.zero if format.symmetric else 0)


def split_into_blocks(values: np.ndarray, block: int) -> np.ndarray:
    """[..., inputs] -> [..., blocks, block]; the last block is padded by repeating the last value.

    So padding never widens a block's range.
    """
    missing = -values.shape[-1] % block
    if missing:
        width = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
        values = np.pad(values, width, mode="edge")
    return values.reshape(*values.shape[:-1], -1, block)


def nearest_numbers(
    blocks: np.ndarray, format: QuantFormat
) -> tuple[np.ndarray, np.ndarray | None]:
    """Computes scale and base from each block's extremes, as float16: [..., blocks].

    Symmetric: the value of largest magnitude becomes the largest level, which sets the scale's
    sign; with an odd number of levels the first or the last.
    """
    if format.symmetric:
        at = np.abs(blocks).argmax(axis=-1)[..., None]
        extreme = np.take_along_axis(blocks, at, axis=-1)[..., 0]
        return to_fp16(extreme / largest_level(format)), None
    low, high = blocks.min(axis=-1), blocks.max(axis=-1)
    return to_fp16((high - low) / (format.levels - 1)), to_fp16(low)


def nearest_codes(
    blocks: np.ndarray, scale: np.ndarray, base: np.ndarray | None, format: QuantFormat
) -> np.ndarray:
    """Rounds [..., blocks, block] values to codes for the stored block numbers, uint8."""
    step = scale.astype(np.float32)
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step != 0)[..., None]
    low = np.float32(0) if base is None else base.astype(np.float32)[..., None]
    levels = nearest_levels((blocks - low) * inverse, format)
    return codes_of(levels, format).astype(np.uint8)


def dequantize(
    codes: np.ndarray, scale: np.ndarray, base: np.ndarray | None, format: QuantFormat
) -> np.ndarray:
    """Dequantizes [..., blocks, block] codes, float32."""
    values = levels_of(codes, format) * scale.astype(np.float32)[..., None]
    return values if base is None else values + base.astype(np.float32)[..., None]


def to_fp16(values: Any, xp: ModuleType = np) -> Any:
    """Rounds to float16; numbers beyond its range become its largest number.

    Args:
        xp: numpy, or jax.numpy for JAX arrays.
    """
    limit = float(np.finfo(np.float16).max)
    return xp.clip(values, -limit, limit).astype(np.float16)

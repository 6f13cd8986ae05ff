"""Round to nearest (RTN): the plain quantizer, which the others start from."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from jinfer.modelspec.quant_format import QuantFormat
from jinfer.quant.levels import codes_of, largest_level, levels_of, nearest_levels


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
    """Scale and base from each block's extremes, as float16: [..., blocks].

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
    """Codes of [..., blocks, block] values for the stored block numbers, uint8."""
    step = scale.astype(np.float32)
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step != 0)[..., None]
    low = np.float32(0) if base is None else base.astype(np.float32)[..., None]
    levels = nearest_levels((blocks - low) * inverse, format)
    return codes_of(levels, format).astype(np.uint8)


def dequantize(
    codes: np.ndarray, scale: np.ndarray, base: np.ndarray | None, format: QuantFormat
) -> np.ndarray:
    """The dequantized [..., blocks, block] codes, float32."""
    values = levels_of(codes, format) * scale.astype(np.float32)[..., None]
    return values if base is None else values + base.astype(np.float32)[..., None]


def to_fp16(values: Any, xp: ModuleType = np) -> Any:
    """Rounded to float16; beyond its range, its largest number.

    Args:
        xp: numpy, or jax.numpy for JAX arrays.
    """
    limit = float(np.finfo(np.float16).max)
    return xp.clip(values, -limit, limit).astype(np.float16)

"""Levels of a block: what codes stand for before scale and base, evenly spaced or from a table.

A level is the code itself in affine formats, the code less that of 0 in symmetric ones, and a value
of the table in non-linear ones (`QuantFormat.codebook`, in ascending order).
"""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from jinfer.modelspec.quant_format import QuantFormat


def largest_level(format: QuantFormat) -> int:
    """The level of largest magnitude of a format without bases."""
    return -format.zero if format.codebook is None else max(format.codebook, key=abs)


def nearest_levels(x: Any, format: QuantFormat, xp: ModuleType = np) -> Any:
    """The nearest level of each number, in units of the scale.

    Args:
        xp: numpy, or jax.numpy for JAX arrays.
    """
    if format.codebook is None:
        least = -format.zero if format.symmetric else 0
        return xp.clip(xp.round(x), least, least + format.levels - 1)
    if xp is np:
        return levels_of(_codes(x, format.codebook), format)
    # A choice at a time: XLA:CPU vectorizes that, and no gather.
    level = xp.full_like(x, format.codebook[0])
    for low, high in pairwise(format.codebook):
        level = xp.where(x > 0.5 * (low + high), np.float32(high), level)
    return level


def codes_of(levels: Any, format: QuantFormat, xp: ModuleType = np) -> Any:
    """The codes of levels, in the same type."""
    if format.codebook is None:
        return levels + format.zero if format.symmetric else levels
    return _codes(levels, format.codebook, xp).astype(levels.dtype)


def _codes(x: Any, table: tuple[int, ...], xp: ModuleType = np) -> Any:
    """The codes of the nearest levels, uint8: NumPy counts in bytes faster than it searches."""
    codes = xp.zeros_like(x, np.uint8)
    for low, high in pairwise(table):
        codes = codes + (x > 0.5 * (low + high)).astype(np.uint8)
    return codes


def levels_of(codes: np.ndarray, format: QuantFormat) -> np.ndarray:
    """The levels of codes, float32."""
    if format.codebook is not None:
        return np.array(format.codebook, np.float32)[codes]
    return codes.astype(np.float32) - np.float32(format.zero if format.symmetric else 0)

"""The error that rounding to the nearest must have on N(0, 1), from the distribution of extremes.

The extremes of a block are levels themselves. Given them, the block's other values are independent
and normal within the range, so that the error is an integral over the range's ends of an integral
over the range.
"""

from __future__ import annotations

import math

import numpy as np

from jinfer.quant import QuantFormat

_STEP = 0.15  # of the grid over the ends
_POINTS = 16  # of the grid over the range, in a step of the format; at least 256 in all


def nearest_rmse(format: QuantFormat) -> float:
    """Root of the mean squared error of `quantize` to a format."""
    return math.sqrt(_symmetric(format) if format.symmetric else _affine(format))


def _affine(format: QuantFormat) -> float:
    n, steps = format.block, format.levels - 1
    low, high = np.meshgrid(np.arange(-6, 1, _STEP), np.arange(-1, 6, _STEP), indexing="ij")
    inside = np.maximum(_below(high) - _below(low), 0)
    density = _density(low) * _density(high) * inside ** (n - 2)  # of the ends, not normalized
    t = _midpoints(steps)
    error = t * steps - np.rint(t * steps)
    width = high - low
    expected = _mean((error / steps) ** 2, low[..., None] + width[..., None] * t) * width**2
    return (n - 2) / n * float((density * expected).sum() / density.sum())


def _symmetric(format: QuantFormat) -> float:
    n, zero = format.block, format.zero
    extreme = np.arange(_STEP, 6, _STEP / 10)
    density = _density(extreme) * (2 * _below(extreme) - 1) ** (n - 1)
    t = 2 * _midpoints(2 * zero) - 1
    codes = np.clip(np.rint(t * zero), -zero, format.levels - 1 - zero)
    squares = (t - codes / zero) ** 2
    expected = _mean(squares, extreme[:, None] * t) * extreme**2
    return (n - 1) / n * float((density * expected).sum() / density.sum())


def _mean(squares: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Over the last axis, where values of the normal distribution stand at x."""
    density = _density(x)
    return (density * squares).sum(axis=-1) / density.sum(axis=-1)


def _midpoints(steps: int) -> np.ndarray:
    """Of equal pieces of 0..1, as many in each step."""
    pieces = steps * max(_POINTS, -(-256 // steps))
    return (np.arange(pieces) + 0.5) / pieces


def _density(x: np.ndarray) -> np.ndarray:
    return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _below(x: np.ndarray) -> np.ndarray:
    """The distribution function."""
    return 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

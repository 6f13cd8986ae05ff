"""Outlier selection: which weights are worth storing exactly beside the codes.

The squared error of a block grows with the square of its range, so removing its k most extreme
weights gains

    gain(k) = (range(0)**2 - range(k)**2) * importance,  k <= 8

up to a factor common to all blocks. Weights are chosen by their share of these gains: the slopes of
the least concave function above each block's gain, so that two weights that only help together
count half of it each.
"""

from __future__ import annotations

import numpy as np

from jinfer.modelspec.quant_format import QuantFormat
from jinfer.quant.round_to_nearest import split_into_blocks

_MOST = 8  # outliers per block
_CHUNK = 1 << 20  # weights at a time


def find_outliers(
    values: np.ndarray, format: QuantFormat, count: int, importance: np.ndarray | None = None
) -> np.ndarray:
    """The outliers: bool [outputs, inputs], true at most `count` times.

    Args:
        values: float32 [outputs, inputs].
        importance: of each input (imatrix): [inputs].
    """
    chosen = np.zeros(values.shape, bool)
    if count == 0:
        return chosen
    inputs, block = values.shape[-1], format.block
    # One value per block, because the whole block gains.
    weights = np.ones(-(-inputs // block), np.float32)
    if importance is not None:
        filled = split_into_blocks(importance.astype(np.float32), block)
        weights = filled.mean(axis=1) / max(float(filled.mean()), 1e-30)
    each = max(1, _CHUNK // inputs)
    slopes = np.concatenate(
        [
            _slopes(split_into_blocks(values[begin : begin + each], block), format)
            for begin in range(0, len(values), each)
        ]
    )
    slopes *= weights[None, :, None]
    flat = slopes.reshape(-1)
    count = min(count, flat.size)
    best = np.argpartition(flat, flat.size - count)[flat.size - count :]
    best = best[flat[best] > 0]
    rows, parts, _ = np.unravel_index(best, slopes.shape)
    taken = np.zeros(slopes.shape[:2], np.int64)
    np.add.at(taken, (rows, parts), 1)
    blocks = split_into_blocks(values, block)
    for k in range(1, int(taken.max(initial=0)) + 1):
        rows, parts = np.nonzero(taken == k)
        columns = parts[:, None] * block + _extremes(blocks[rows, parts], k, format)
        real = columns < inputs
        chosen[np.broadcast_to(rows[:, None], real.shape)[real], columns[real]] = True
    return chosen


def without_outliers(values: np.ndarray, outliers: np.ndarray, block: int) -> np.ndarray:
    """The matrix with outliers replaced by the mean of their block's other weights."""
    if not outliers.any():
        return values
    kept, parts = ~split_into_blocks(outliers, block), split_into_blocks(values, block)
    mean = (parts * kept).sum(axis=-1) / np.maximum(kept.sum(axis=-1), 1)
    filled = np.where(kept, parts, mean[..., None].astype(np.float32))
    return filled.reshape(len(values), -1)[:, : values.shape[-1]]


def _slopes(blocks: np.ndarray, format: QuantFormat) -> np.ndarray:
    """What the k-th weight removed from each block adds to its gain: [..., blocks, k], falling."""
    most = min(_MOST, format.block // 2)
    if format.symmetric:
        magnitudes = np.sort(np.abs(blocks), axis=-1)[..., ::-1]
        left = magnitudes[..., : most + 1] * np.float32(2)
    else:
        ordered = np.sort(blocks, axis=-1)
        each = [_ranges(ordered, k).min(axis=-1) for k in range(most + 1)]
        left = np.stack(each, axis=-1)
    gain = left[..., :1] ** 2 - left**2
    slopes = np.empty((*gain.shape[:-1], most), np.float32)
    for k in range(1, most + 1):
        steepest = [
            np.max([(gain[..., b] - gain[..., a]) / (b - a) for b in range(k, most + 1)], axis=0)
            for a in range(k)
        ]
        slopes[..., k - 1] = np.min(steepest, axis=0)
    return slopes


def _ranges(ordered: np.ndarray, k: int) -> np.ndarray:
    """The range without k weights, the l lowest and the k - l highest: [..., l], l <= k."""
    lowest = np.arange(k + 1)
    return ordered[..., lowest - k - 1] - ordered[..., lowest]


def _extremes(blocks: np.ndarray, k: int, format: QuantFormat) -> np.ndarray:
    """The k weights whose removal minimizes the range of each block: [n, block] -> [n, k]."""
    if format.symmetric:
        return np.argsort(-np.abs(blocks), axis=-1, kind="stable")[:, :k]
    order = np.argsort(blocks, axis=-1, kind="stable")
    lowest = _ranges(np.take_along_axis(blocks, order, axis=-1), k).argmin(axis=-1)
    # The k - l highest and the l lowest are adjacent in cyclic order.
    places = lowest[:, None] - k + np.arange(k)
    return np.take_along_axis(order, places % blocks.shape[-1], axis=-1)

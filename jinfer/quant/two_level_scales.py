"""Two-level scales of small blocks: integers times a factor of 256 weights, as K-quants have them.

NVFP4's scales of 16 weights are E4M3 times a number of the tensor. Here they are integers times
that number and a power of two, so that nothing but the factor is rounded where the scales of 256
weights are within a factor of eight of each other; else the smaller ones are, by at most 1/127 of
the largest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jinfer.quant.quantized_tensor import SUPER

if TYPE_CHECKING:
    from jaxtyping import Float, Float16, Int8

_MOST = 127  # of the integers


@np.errstate(all="ignore")  # NaN and infinity are values like others
def split_scales(
    scales: Float[np.ndarray, "*rows blocks"], unit: Float[np.ndarray, "*rows 1"], block: int
) -> tuple[Int8[np.ndarray, "*rows blocks"], Float16[np.ndarray, "*rows supers"]]:
    """Integers of blocks, and the factors of 256 weights.

    Args:
        unit: what scales are small floats times.
        block: weights of a scale.
    """
    parts = _parted(scales, block)
    largest = np.abs(parts).max(axis=-1) / unit
    power = np.ceil(np.log2(np.where(largest > 0, largest, 1) / _MOST))
    steps = (unit * np.exp2(power)).astype(np.float32)
    integers = np.clip(np.rint(parts / steps[..., None]), -_MOST, _MOST)
    integers = np.nan_to_num(integers).astype(np.int8).reshape(*scales.shape[:-1], -1)
    return integers[..., : scales.shape[-1]], steps.astype(np.float16)


@np.errstate(all="ignore")
def split_error(
    scales: Float[np.ndarray, "*rows blocks"], unit: Float[np.ndarray, "*rows 1"], block: int
) -> float:
    """How far off a scale is at most, relative to the largest of its 256 weights."""
    integers, steps = split_scales(scales, unit, block)
    wide = np.repeat(steps.astype(np.float32), SUPER // block, axis=-1)[..., : scales.shape[-1]]
    largest = np.abs(_parted(scales, block)).max(axis=-1, keepdims=True)
    off = np.abs(_parted(integers * wide - scales, block))
    return float(np.where(off == 0, 0, off / largest).max(initial=0))


def _parted(scales: np.ndarray, block: int) -> np.ndarray:
    """[*rows, blocks] -> [*rows, supers, blocks of one], with zeros behind the last."""
    each = SUPER // block
    padding = [(0, 0)] * (scales.ndim - 1) + [(0, -scales.shape[-1] % each)]
    return np.pad(scales, padding).reshape(*scales.shape[:-1], -1, each)

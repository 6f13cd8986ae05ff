"""What a quantized cache gives back, by its definition."""

import numpy as np

from .numpy_blocks import Floats

REACH = {"q2": 0.73, "q3": 0.91, "q3.5": 0.95}
LEVELS = {"q2": 4, "q3": 8, "q3.5": 11, "q4": 16, "q5": 32, "q6": 64, "q8": 256}


def kept(x: Floats, kind: str) -> Floats:
    """Numbers as a cache of this kind keeps them, in blocks of 32 along the last axis.

    8 bits: steps of a 128th of the block's extreme, which is the first level. Fewer bits: even
    steps over the range from the smallest to the largest number, or over the middle part of it
    that REACH says. Steps and the numbers that they begin at are float16.
    """
    if kind in ("f32", "f16"):
        return x.astype({"f32": np.float32, "f16": np.float16}[kind]).astype(np.float64)
    levels = LEVELS[kind]
    out = np.empty_like(x, np.float64)
    for start in range(0, x.shape[-1], 32):
        block = x[..., start : start + 32]
        low, high = block.min(axis=-1, keepdims=True), block.max(axis=-1, keepdims=True)
        if kind == "q8":
            step = np.where(high >= -low, high, low) / -128
            first, begin = -128.0, np.zeros_like(low)
        else:
            reach = REACH.get(kind, 1.0)
            step, first = reach * (high - low) / (levels - 1), 0.0
            begin = (low + (1 - reach) / 2 * (high - low)).astype(np.float16)
        step = step.astype(np.float16).astype(np.float64)
        q = np.rint((block - begin) / np.where(step == 0, 1, step))
        q = np.clip(q, first, first + levels - 1)
        out[..., start : start + 32] = q * step + begin
    return out

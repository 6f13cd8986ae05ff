"""Which formats matrices get under a budget, by their sizes and by what they lose.

Bits are those that a weight takes in memory on average over all matrices, embeddings and heads,
with scales and padding.
"""

from __future__ import annotations

import numpy as np

from jinfer.modelspec.quant_format import QuantFormat, parse_format
from jinfer.ops.backend import backend

# More widths, or blocks of 32 and 128 too, lower the divergence by less than 1%. The GPU's kernels
# look up tables of 16 values only.
_FORMATS = ("q2_b64_nl", "q3_b64_nl", "q4_b64_nl", "q5_b64_sym", "q6_b64_sym", "q8_b64")
_GPU_FORMATS = ("q2_b64", "q3_b64", *_FORMATS[2:])


def candidates() -> list[QuantFormat]:
    """The formats to choose from, in ascending order of their bits."""
    return [parse_format(name) for name in (_GPU_FORMATS if backend() == "gpu" else _FORMATS)]


def choose(sizes: np.ndarray, losses: np.ndarray, room: float) -> list[int]:
    """Which format each matrix gets: from the narrowest on, what gains most for each bit.

    Args:
        sizes, losses: in bits and in divergence, [matrices, formats]; sizes ascend.
        room: for the sizes of all.
    """
    rows = np.arange(len(sizes))
    chosen = np.zeros(len(sizes), np.int64)
    while True:
        more = sizes - sizes[rows, chosen][:, None]
        gain = losses[rows, chosen][:, None] - losses
        left = room - sizes[rows, chosen].sum()
        rate = np.where((more > 0) & (more <= left), gain / np.maximum(more, 1), 0)
        best = int(rate.argmax())
        if rate.flat[best] <= 0:
            return chosen.tolist()
        chosen[best // sizes.shape[1]] = best % sizes.shape[1]

"""Row blocks: threads over blocks of a matrix's rows, each row computed independently."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_ROWS = 256  # per block: fits the L2 cache, and leaves enough blocks for all threads
_EVEN = 64


def equal_row_blocks(outputs: int) -> Iterator[slice]:
    """Blocks of equal size, for which one compiled program suffices: the last may overlap."""
    count = -(-outputs // _ROWS)
    each = min(outputs, -(-outputs // count // _EVEN) * _EVEN)
    for begin in range(0, outputs, each):
        start = min(begin, outputs - each)
        yield slice(start, start + each)


def map_row_blocks(work: Callable[[slice], Sequence[np.ndarray]], outputs: int) -> list[np.ndarray]:
    """Applies a function to blocks of rows on several threads, and concatenates its arrays."""
    parts = list(equal_row_blocks(outputs))
    with ThreadPoolExecutor(min(len(parts), 4, os.cpu_count() or 1)) as pool:
        results = pool.map(work, parts)
        whole: list[np.ndarray] = []
        for rows, found in zip(parts, results, strict=True):
            whole = whole or [np.empty((outputs, *each.shape[1:]), each.dtype) for each in found]
            for target, part in zip(whole, found, strict=True):
                target[rows] = part
    return whole

"""Rows of a matrix, each of which is computed by itself, some at a time on several threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_ROWS = 256  # what is known of them stays in the L2 cache, and threads find enough to do
_EVEN = 64


def tiles(outputs: int) -> Iterator[slice]:
    """Parts of as many rows each, for which one compiled program will do: the last may overlap."""
    count = -(-outputs // _ROWS)
    each = min(outputs, -(-outputs // count // _EVEN) * _EVEN)
    for begin in range(0, outputs, each):
        start = min(begin, outputs - each)
        yield slice(start, start + each)


def by_rows(work: Callable[[slice], Sequence[np.ndarray]], outputs: int) -> list[np.ndarray]:
    """What some work gives for all rows, of arrays whose first axis are rows."""
    parts = list(tiles(outputs))
    with ThreadPoolExecutor(min(len(parts), 4, os.cpu_count() or 1)) as pool:
        results = pool.map(work, parts)
        whole: list[np.ndarray] = []
        for rows, found in zip(parts, results, strict=True):
            whole = whole or [np.empty((outputs, *each.shape[1:]), each.dtype) for each in found]
            for target, part in zip(whole, found, strict=True):
                target[rows] = part
    return whole

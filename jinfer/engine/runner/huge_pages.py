"""Huge pages for the part of a CPU's KV cache that is in use."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax import Array

from jinfer.ops.attention.kv_cache import CacheShapes

HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


class CacheHugePages:
    """Asks the system for huge pages where blocks of a cache are used, as more of them are.

    Attention at depth reads all of a sequence's keys and values for each token, of each head 8 KB
    at a time: with small pages it waits for TLB misses. Where huge pages were asked for before any
    block was used, each layer's pools would take 2 MiB with the first token. So a huge page is
    asked for once half of it is in use, and then the small pages, if any have been touched, are
    copied into it (Linux 6.1). Elsewhere than on Linux, and on a GPU, nothing happens.
    """

    def __init__(self, shapes: CacheShapes) -> None:
        self._shapes = shapes
        self._asked: dict[str, int] = {}  # blocks of each group, by which it was asked last
        self._next: dict[str, int] = {}  # blocks at which there may be another huge page

    def use(self, pools: Any, group: str, blocks: int) -> None:
        """Blocks 0 .. `blocks` - 1 of a group are in use."""
        if blocks < self._next.get(group, 1) or not supported():
            return
        arrays = [*self._arrays(pools, group)]
        largest = max((array.nbytes // len(array) for array in arrays), default=HUGE_PAGE)
        for array in arrays:
            each, begin = array.nbytes // len(array), array.unsafe_buffer_pointer()
            done = begin + self._asked.get(group, 0) * each + HUGE_PAGE // 2
            first = max(-(-begin // HUGE_PAGE), done // HUGE_PAGE) * HUGE_PAGE
            end = (begin + blocks * each + HUGE_PAGE // 2) // HUGE_PAGE * HUGE_PAGE
            end = min(end, (begin + array.nbytes) // HUGE_PAGE * HUGE_PAGE)
            if first < end:
                _advise(first, end - first)
        self._asked[group], self._next[group] = blocks, blocks + max(1, HUGE_PAGE // 8 // largest)

    def _arrays(self, pools: Any, group: str) -> Iterator[Array]:
        if not isinstance(pools, Mapping):  # of parts of the model
            return
        for name, shape in self._shapes.items():
            if shape.group == group:
                for array in jax.tree.leaves(pools[name]):
                    one = [device.platform for device in array.devices()] == ["cpu"]
                    if one and array.nbytes >= HUGE_PAGE:
                        yield array


@cache
def supported() -> bool:
    """Whether the system gives huge pages where they are asked for."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    try:
        return sys.platform == "linux" and "[never]" not in setting.read_text(encoding="ascii")
    except OSError:
        return False


def _advise(begin: int, length: int) -> None:
    """Asks for huge pages; a kernel that has none goes on with small ones."""
    madvise = ctypes.CDLL(None).madvise
    for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(advice))

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

from jinfer.ops.attention.kv_cache import CacheShapes, LayerCache

HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


class CacheHugePages:
    """Asks the system for huge pages where blocks of a cache are used, as more of them are.

    Attention at depth reads all of a sequence's keys and values for each token, of each head 8 KB
    at a time: with small pages it waits for TLB misses. Where huge pages were asked for before any
    block was used, each layer's pools would take 2 MiB with the first token. So a huge page is
    asked for once half of it is in use, and then the small pages, if any have been touched, are
    copied into it (Linux 6.1). Elsewhere than on Linux, and on a GPU, nothing happens.

    Int8 keys are only written in long texts. A huge page would take the memory of other texts' too.
    """

    def __init__(self, shapes: CacheShapes) -> None:
        self._shapes = shapes
        # Of each group, and of its int8 keys:
        self._asked: dict[tuple[str, bool], int] = {}  # blocks by which it was asked last
        self._next: dict[tuple[str, bool], int] = {}  # blocks that may be one more huge page

    def use(self, pools: Any, group: str, blocks: int, *, int8_keys: bool = False) -> None:
        """Blocks 0 .. `blocks` - 1 of a group, or their int8 keys, are in use."""
        key = group, int8_keys
        if blocks < self._next.get(key, 1) or not supported():
            return
        arrays = [*self._arrays(pools, group, int8_keys)]
        largest = max((array.nbytes // len(array) for array in arrays), default=HUGE_PAGE)
        for array in arrays:
            each, begin = array.nbytes // len(array), array.unsafe_buffer_pointer()
            done = begin + self._asked.get(key, 0) * each + HUGE_PAGE // 2
            first = max(-(-begin // HUGE_PAGE), done // HUGE_PAGE) * HUGE_PAGE
            end = (begin + blocks * each + HUGE_PAGE // 2) // HUGE_PAGE * HUGE_PAGE
            end = min(end, (begin + array.nbytes) // HUGE_PAGE * HUGE_PAGE)
            if first < end:
                _advise(first, end - first)
        self._asked[key], self._next[key] = blocks, blocks + max(1, HUGE_PAGE // 8 // largest)

    def _arrays(self, pools: Any, group: str, int8_keys: bool) -> Iterator[Array]:
        if not isinstance(pools, Mapping):  # of parts of the model
            return
        for name, shape in self._shapes.items():
            if shape.group == group:
                pool = pools[name]
                if isinstance(pool, LayerCache):
                    pool = pool.int8_keys if int8_keys else pool._replace(int8_keys=None)
                elif int8_keys:
                    continue
                for array in jax.tree.leaves(pool):
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

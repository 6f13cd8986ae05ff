"""How large the cache is: from the memory there is, or as asked."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinfer.modelspec.cache_dtype import Kind
from jinfer.ops.attention.kv_cache import BLOCK, ENCODER, CacheShape, abstract, nbytes
from jinfer.xla.device import first_device

SHARE = 0.4  # of the memory that is free
_SEQUENCES = 4  # of the whole context, that there is room for even with one slot: beams


def block_bytes(shapes: Mapping[str, CacheShape], kind: Kind) -> dict[str, int]:
    """Bytes of a block of each group, all its attentions together."""
    bytes_: dict[str, int] = {}
    # A plan of memory asks hundreds of times, and most layers are alike.
    for shape, count in Counter(shapes.values()).items():
        size = nbytes(abstract({"": shape}, 1, kind))
        bytes_[shape.group] = bytes_.get(shape.group, 0) + count * size
    return bytes_


def cache_blocks(
    shapes: Mapping[str, CacheShape],
    kind: Kind,
    *,
    slots: int,
    context: int,
    chunk: int,
    tokens: int | None,
    used: int,
    free: int | None = None,
) -> dict[str, int]:
    """Blocks of each group.

    A windowed group gets what all slots can hold at a time: a window and a chunk each. The others
    get room for `tokens`, or for the context of every slot as far as memory allows, and at least
    for one whole context.

    Args:
        chunk: tokens of a sequence that a step may add.
        tokens: that the cache is to have room for; None: as many as memory allows.
        used: bytes of memory that are spoken for, such as the weights'.
        free: bytes that there are; None: those of the first device.
    """
    windows = {shape.group: shape.window for shape in shapes.values()}
    whole = -(-context // BLOCK)
    blocks: dict[str, int] = {}
    for group, window in windows.items():
        if group == ENCODER:
            blocks[group] = slots * whole
        elif window is not None:
            blocks[group] = slots * min(whole + 1, -(-(window + chunk) // BLOCK) + 2)
    sizes = block_bytes(shapes, kind)
    fixed = sum(sizes[group] * count for group, count in blocks.items())
    each = sum(size for group, size in sizes.items() if group not in blocks)
    if each:
        most = max(slots, _SEQUENCES) * (whole + 1)
        if tokens is not None:
            most = -(-tokens // BLOCK)
        else:
            free = free_memory() if free is None else free
            fits = int(SHARE * max(0, free - used) - fixed) // each
            most = max(whole + 1, min(most, fits))
        blocks |= dict.fromkeys((group for group in windows if group not in blocks), most)
    return blocks


def free_memory(device: Any | None = None) -> int:
    """Bytes that are free on a device; on a CPU the machine's, or what its container leaves.

    Args:
        device: None: the first.
    """
    device = device or first_device()
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return host_memory()


def host_memory() -> int:
    """Bytes that are free of the machine's memory, or of what its container leaves."""
    return min(_machine(), _container())


def _machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) << 10


def _container() -> int:
    """What a control group leaves (v2, then v1); without a limit, more than there is."""
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            most, now = (Path(path).read_text(encoding="ascii").strip() for path in (limit, usage))
        except OSError:
            continue
        if most.isdecimal():
            return max(0, int(most) - int(now))
    return 1 << 62


def trim() -> None:
    """Gives the system back what was freed: glibc keeps it, for weights would be most of them."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)

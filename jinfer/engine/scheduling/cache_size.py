"""KV-cache size: blocks of each attention group, from free memory or from `engine.kv_tokens`."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from jinfer.modelspec.model_spec import EngineSpec
from jinfer.ops.attention.kv_cache import (
    BLOCK,
    ENCODER,
    STATE,
    CacheShapes,
    abstract_cache,
    nbytes,
)
from jinfer.quant_format import Kind

SHARE = 0.4  # of the free memory
_SEQUENCES = 4  # whole contexts that fit even with one slot, for beams
_SNAPSHOT_SHARE = 0.05  # of the free memory, for snapshots of recurrent states
_SNAPSHOTS = 256  # at most


def block_bytes(shapes: CacheShapes, kind: Kind) -> dict[str, int]:
    """Bytes of a block of each group, over all its attentions."""
    bytes_: dict[str, int] = {}
    # Called hundreds of times by the memory plan; most layers are alike.
    for shape, count in Counter(shapes.values()).items():
        size = nbytes(abstract_cache({"": shape}, 1, kind))
        bytes_[shape.group] = bytes_.get(shape.group, 0) + count * size
    return bytes_


def cache_blocks(
    shapes: CacheShapes,
    kind: Kind,
    engine: EngineSpec,
    context: int,
    *,
    used: int = 0,
    free: int | None = None,
) -> dict[str, int]:
    """Number of blocks of each group.

    A sliding-window group gets as many as all slots can use at a time, a window and a chunk each,
    or a few beams of one slot as far as memory allows. The others get room for `engine.kv_tokens`,
    or for the context of every slot as far as memory allows, and at least for one whole context.
    Recurrent states get twice as many as there are slots, as beams need more than one each, and
    `engine.state_snapshots` more, or as many as memory allows.

    Args:
        shapes: the attentions' parts of a block.
        kind: number format of the cache.
        context: tokens of a sequence, at most.
        used: bytes that are reserved otherwise, such as for weights.
        free: free bytes; None: those of the first device.
    """
    windows = {shape.group: shape.window for shape in shapes.values()}
    whole, slots, tokens = -(-context // BLOCK), engine.slots, engine.kv_tokens
    blocks: dict[str, int] = {}
    for group, window in windows.items():
        if group == ENCODER:
            blocks[group] = slots * whole
        elif group == STATE:
            blocks[group] = 2 * max(slots, _SEQUENCES)
        elif window is not None:
            blocks[group] = min(whole + 1, -(-(window + engine.prefill_chunk) // BLOCK) + 2) * slots
    sizes = block_bytes(shapes, kind)
    in_windows = [group for group in blocks if windows[group] is not None]
    if in_windows and slots < _SEQUENCES:
        free = free_memory() if free is None else free
        more = {group: blocks[group] // slots * _SEQUENCES for group in in_windows}
        if sum(sizes[group] * count for group, count in more.items()) <= SHARE * (free - used):
            blocks |= more
    if STATE in blocks and engine.state_snapshots is not None:
        blocks[STATE] += engine.state_snapshots
    elif STATE in blocks:
        free = free_memory() if free is None else free
        room = int(_SNAPSHOT_SHARE * max(0, free - used)) // sizes[STATE]
        blocks[STATE] += max(_SEQUENCES, min(_SNAPSHOTS, room))
    fixed = sum(sizes[group] * count for group, count in blocks.items())
    each = sum(size for group, size in sizes.items() if group not in blocks)
    if each:
        group_blocks = max(slots, _SEQUENCES) * (whole + 1)
        if tokens is not None:
            group_blocks = -(-tokens // BLOCK)
        else:
            free = free_memory() if free is None else free
            fits = int(SHARE * max(0, free - used) - fixed) // each
            group_blocks = max(whole + 1, min(group_blocks, fits))
        blocks |= dict.fromkeys((group for group in windows if group not in blocks), group_blocks)
    return blocks


def fewest_blocks(each: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The blocks of each group that every memory has room for: all share the block tables."""
    fewest: dict[str, int] = {}
    for blocks in each:
        fewest |= {group: min(n, fewest.get(group, n)) for group, n in blocks.items()}
    return fewest


def free_memory(device: Any | None = None) -> int:
    """Free bytes of a device; on a CPU, of the machine or of its container.

    Args:
        device: None: the first device.
    """
    device = device or jax.local_devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return host_memory()


def host_memory() -> int:
    """Free bytes of the machine's memory, within its container's limit."""
    return min(_machine(), _container())


def _machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) << 10


def _container() -> int:
    """Free bytes within the control group's limit (v2, then v1); without a limit, 2**62."""
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            maximum, now = (
                Path(path).read_text(encoding="ascii").strip() for path in (limit, usage)
            )
        except OSError:
            continue
        if maximum.isdecimal():
            return max(0, int(maximum) - int(now))
    return 1 << 62


def trim() -> None:
    """Returns freed memory to the system; glibc would keep it, after weights most of them."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)

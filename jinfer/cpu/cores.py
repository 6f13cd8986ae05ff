"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_ROOT = Path("/")
bounds: dict[int, int] = {}  # that are in force: see `jinfer.cpu.call_threads`


def usable_cores(root: Path = _ROOT) -> int:
    """Cores that the scheduler gives: those of the affinity, no more than the container's quota.

    `os.cpu_count()` knows neither. More threads than cores wait for each other's turns.

    Args:
        root: of the file system that control groups are read from.
    """
    allowed = getattr(os, "sched_getaffinity", None)
    cores = len(allowed(0)) if allowed is not None else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, cpu_quota(root))))


def most_threads() -> int:
    """Threads that may compute: a core each, no more than any bound that is in force."""
    return min([usable_cores(), *bounds.values()])


def cpu_quota(root: Path = _ROOT) -> float:
    """Cores' worth of time that the control groups of this process leave it; infinite without."""
    least = math.inf
    groups = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, kinds, name = line.split(":", 2) if line.count(":") >= 2 else ("", "", "")
        base = groups / "cpu" if "cpu" in kinds.split(",") else groups
        own = base / name.lstrip("/")
        # A group's ancestors limit it too; a container may see only the root, as its own.
        for folder in (own, *own.parents):
            least = min(least, _quota(folder))
            if folder == base:
                break
    return least


def _quota(folder: Path) -> float:
    words = _text(folder / "cpu.max").split() or [
        *_text(folder / "cpu.cfs_quota_us").split(),
        *_text(folder / "cpu.cfs_period_us").split(),
    ]
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # "max", or no such file
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""

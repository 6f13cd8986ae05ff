"""CPU cores that this process may use: affinity and container quotas."""

from __future__ import annotations

import math
import os
from pathlib import Path

_ROOT = Path("/")
limits: dict[int, int] = {}  # in force; see `jinfer.cpu.library_calls`


def usable_cores(root: Path = _ROOT) -> int:
    """Counts the cores of the process's affinity, at most the container's quota, rounded up.

    `os.cpu_count()` ignores both. More threads than cores would take turns.

    Args:
        root: of the file system that control groups are read from.
    """
    allowed = getattr(os, "sched_getaffinity", None)
    cores = len(allowed(0)) if allowed is not None else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, cpu_quota(root))))


def max_threads() -> int:
    """Returns the number of compute threads: one per usable core, at most any limit in force."""
    return min([usable_cores(), *limits.values()])


def cpu_quota(root: Path = _ROOT) -> float:
    """Reads the CPU quota of this process's control groups (cgroup v1, v2) in cores or inf."""
    least = math.inf
    groups = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, kinds, name = line.split(":", 2) if line.count(":") >= 2 else ("", "", "")
        base = groups / "cpu" if "cpu" in kinds.split(",") else groups
        group = base / name.lstrip("/")
        # A group's ancestors limit it too; a container may see only the root, as its own.
        for folder in (group, *group.parents):
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

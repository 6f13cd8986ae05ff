"""Memory maps: a compiled program takes hundreds of them, and a process may have only so many."""

from __future__ import annotations

from pathlib import Path

from jinfer.engine.requests import EngineError

_MAPS, _LIMIT = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
_SPARE = 2000  # for the program that is about to be made, and for threads' stacks


def check_maps(maps: Path = _MAPS, limit: Path = _LIMIT) -> None:
    """Raises `EngineError` where another program would take more maps than Linux allows.

    XLA does not look: the process would end with a segmentation fault.
    """
    try:
        count = maps.read_bytes().count(b"\n")
        most = int(limit.read_text())
    except (OSError, ValueError):
        return  # another system, which has no such limit
    if count > most - _SPARE:
        raise EngineError(
            f"this process has {count:,} of the {most:,} memory maps that the system allows, and "
            "each compiled program takes hundreds; close models that are no longer used, or raise "
            "the limit: sysctl -w vm.max_map_count=262144"
        )

"""Memory map limit: a program takes hundreds of maps, and Linux limits those of a process."""

from __future__ import annotations

from pathlib import Path

from jinfer.engine.requests import EngineError

_MAPS, _LIMIT = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
_SPARE = 2000  # for the next program and for threads' stacks


def check_maps(maps: Path = _MAPS, limit: Path = _LIMIT) -> None:
    """Checks that there are enough memory maps left for another program.

    XLA does not check: the process would end with a segmentation fault.

    Raises:
        EngineError: there are too few.
    """
    try:
        count = maps.read_bytes().count(b"\n")
        most = int(limit.read_text())
    except (OSError, ValueError):
        return  # not Linux, so there is no such limit
    if count > most - _SPARE:
        raise EngineError(
            f"this process has {count:,} of the {most:,} memory maps that the system allows, and "
            "each compiled program takes hundreds; close models that are no longer used, or raise "
            "the limit: sysctl -w vm.max_map_count=262144"
        )

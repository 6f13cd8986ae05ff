"""Thread limits of the custom calls."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from jinfer.cpu import build_library
from jinfer.cpu.cores import limits, most_threads

_keys = count()


def limit_threads(threads: int) -> Callable[[], None]:
    """Limits the threads of custom calls, in the whole process, until the result is called.

    Of several limits in force the lowest counts.
    """
    key = next(_keys)
    limits[key] = threads
    _apply()

    def lift() -> None:
        limits.pop(key, None)
        _apply()

    return lift


def _apply() -> None:
    if (library := build_library.opened_already()) is not None:
        library.jinfer_limit_threads(most_threads())

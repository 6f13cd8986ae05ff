"""A bound on the threads that custom calls share their work among."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from jinfer.cpu import build_library
from jinfer.cpu.cores import bounds, most_threads

_names = count()


def bound(threads: int) -> Callable[[], None]:
    """At most so many threads from now on, in the whole process, until the result is called.

    Of several bounds that are in force the least counts.
    """
    name = next(_names)
    bounds[name] = threads
    _tell()

    def lift() -> None:
        bounds.pop(name, None)
        _tell()

    return lift


def _tell() -> None:
    if (library := build_library.opened_already()) is not None:
        library.jinfer_limit_threads(most_threads())

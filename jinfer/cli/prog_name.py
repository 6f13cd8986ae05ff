"""Program name (argparse's `prog`) for usage lines, as the user typed it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_COMMAND: ContextVar[str] = ContextVar("command", default="")


def prog_of_module(module: str) -> str:
    """Return `jinfer inspect`, or `python -m MODULE` if the module was run directly.

    Args:
        module: the caller's `__spec__.name`, which is set also for `__main__`.
    """
    command = _COMMAND.get()
    return f"{prog_of_jinfer()} {command}" if command else f"python -m {module}"


def prog_of_jinfer() -> str:
    """Return `jinfer`, or `python -m jinfer` if it was started so."""
    started = getattr(sys.modules["__main__"], "__spec__", None)
    return "python -m jinfer" if started and started.name == "jinfer.__main__" else "jinfer"


@contextmanager
def running_command(name: str) -> Iterator[None]:
    """Set the name of the subcommand that runs inside the context."""
    before = _COMMAND.set(name)
    try:
        yield
    finally:
        _COMMAND.reset(before)

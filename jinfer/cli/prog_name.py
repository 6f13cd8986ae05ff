"""What the user typed to run a program, as its usage line says it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_COMMAND: ContextVar[str] = ContextVar("command", default="")


def program(module: str) -> str:
    """`jinfer inspect`, or `python -m tools.inspect` where the module itself was run.

    Args:
        module: `__spec__.name` of who asks, which is its name also while it is run as a program.
    """
    command = _COMMAND.get()
    return f"{jinfer()} {command}" if command else f"python -m {module}"


def jinfer() -> str:
    """How `jinfer` itself was started."""
    started = getattr(sys.modules["__main__"], "__spec__", None)
    return "python -m jinfer" if started and started.name == "jinfer.__main__" else "jinfer"


@contextmanager
def command(name: str) -> Iterator[None]:
    """What runs inside was chosen by the word `name` of the command line."""
    before = _COMMAND.set(name)
    try:
        yield
    finally:
        _COMMAND.reset(before)

"""For which kind of device operations are traced: one process may have several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jinfer.xla.device import platform

_TARGET: ContextVar[str | None] = ContextVar("target", default=None)
_INTERPRETED: ContextVar[bool] = ContextVar("interpreted", default=False)


def backend() -> str:
    """ "cpu", "gpu" or another platform, by JAX's name."""
    return _TARGET.get() or platform()


def interpreted() -> bool:
    """Whether kernels of a GPU are to run without one, slowly."""
    return _INTERPRETED.get()


@contextmanager
def target(platform: str, *, interpret: bool = False) -> Iterator[None]:
    """What is traced meanwhile, by this thread, is for devices of a platform.

    Args:
        interpret: a GPU's kernels run without one.
    """
    tokens = _TARGET.set(platform), _INTERPRETED.set(interpret)
    try:
        yield
    finally:
        _TARGET.reset(tokens[0])
        _INTERPRETED.reset(tokens[1])

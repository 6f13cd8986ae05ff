"""For which kind of device operations are traced: one process may have several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_TARGET: ContextVar[str | None] = ContextVar("target", default=None)


def backend() -> str:
    """ "cpu", "gpu" or another platform, by JAX's name."""
    return _TARGET.get() or jax.default_backend()


@contextmanager
def target(platform: str) -> Iterator[None]:
    """What is traced meanwhile, by this thread, is for devices of a platform."""
    token = _TARGET.set(platform)
    try:
        yield
    finally:
        _TARGET.reset(token)

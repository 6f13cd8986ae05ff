"""Target platform of the code being traced; one process may compile for several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

from jinfer.cpu import build_library

# A target beside JAX's platforms: any of them, by XLA's own operations, all with derivatives.
DIFFERENTIABLE = "differentiable"

_TARGET: ContextVar[str | None] = ContextVar("target", default=None)
_INTERPRETED: ContextVar[bool] = ContextVar("interpreted", default=False)


def backend() -> str:
    """The target platform by JAX's name, such as "cpu" or "gpu"; or `DIFFERENTIABLE`."""
    return _TARGET.get() or jax.default_backend()


def needs_derivatives() -> bool:
    """Whether code traced here is to be differentiated: no kernels, which have no derivative, and
    no loop with a number of steps that is only known when it runs, which has none backwards.
    """
    return backend() == DIFFERENTIABLE


def has_cpu_calls() -> bool:
    """Whether code traced here can use the CPU's custom calls; compiles them the first time."""
    return backend() == "cpu" and build_library.available()


def interpreted() -> bool:
    """Whether GPU kernels run in Pallas' interpret mode: slowly, without a GPU."""
    return _INTERPRETED.get()


@contextmanager
def target_platform(platform: str, *, interpret: bool = False) -> Iterator[None]:
    """Code that this thread traces within the context targets the given platform.

    Args:
        platform: by JAX's name, or `DIFFERENTIABLE`.
        interpret: run GPU kernels in interpret mode.
    """
    tokens = _TARGET.set(platform), _INTERPRETED.set(interpret)
    try:
        yield
    finally:
        _TARGET.reset(tokens[0])
        _INTERPRETED.reset(tokens[1])

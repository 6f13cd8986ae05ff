"""Token sampling by a CPU custom call; `jinfer.sampling` has the XLA version."""

from __future__ import annotations

from collections.abc import Iterable

from jinfer.cpu.sample import layout, log_probabilities, sample
from jinfer.ops.backend import has_cpu_calls

__all__ = ["available", "knows", "layout", "log_probabilities", "sample"]


def available() -> bool:
    """Whether code traced here can use the custom call."""
    return has_cpu_calls()


def knows(samplers: Iterable[str]) -> bool:
    """Whether the custom calls are available and compute all of these samplers."""
    return available() and set(samplers) <= set(layout().samplers)

"""The sampler's custom calls; `jinfer.sampling` has the same in XLA's operations."""

from __future__ import annotations

from jinfer.cpu import sample as cpu
from jinfer.cpu.sample import choose, log_probabilities
from jinfer.ops.backend import backend

__all__ = ["available", "choose", "log_probabilities"]


def available() -> bool:
    """Whether what is traced can call them."""
    return backend() == "cpu" and cpu.available()

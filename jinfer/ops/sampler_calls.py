"""Token sampling by a CPU custom call; `jinfer.sampling` has the XLA version."""

from __future__ import annotations

from jinfer.cpu import sample as cpu
from jinfer.cpu.sample import log_probabilities, sample
from jinfer.ops.backend import backend

__all__ = ["available", "log_probabilities", "sample"]


def available() -> bool:
    """Whether code traced here can use the custom call."""
    return backend() == "cpu" and cpu.available()

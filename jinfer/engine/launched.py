"""A call of the device whose tokens the host has not read yet."""

from __future__ import annotations

from dataclasses import dataclass

from jinfer.engine.chosen import Chosen
from jinfer.engine.scheduler import Running


@dataclass(frozen=True)
class Launched:
    """A call whose tokens the host has not read yet.

    Attributes:
        chosen: with a leading axis of steps.
        rows: (row of the result, sequence).
        steps: tokens of each sequence, at most.
        at: when, in seconds.
        decodes: whether it is of decoding alone, whose steps are timed.
    """

    chosen: Chosen
    rows: tuple[tuple[int, Running], ...]
    steps: int
    at: float = 0.0
    decodes: bool = False

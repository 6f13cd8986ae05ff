"""A call of the device whose tokens the host has not read yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jinfer.engine.runner.sampler_output import Chosen
from jinfer.engine.scheduling.scheduler import Running


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

    def has(self, sequences: Sequence[Running]) -> bool:
        """Whether it gives tokens of any of these."""
        return any(own is one for _, own in self.rows for one in sequences)


def any_for(calls: Iterable[Launched], sequences: Sequence[Running] | None) -> bool:
    """Whether any of some calls gives tokens of any of these; None: of anybody."""
    return any(sequences is None or call.has(sequences) for call in calls)

"""Calls in flight: launched on the device, their tokens not read by the host yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jinfer.engine.runner.sampler_output import SamplerOutput
from jinfer.engine.scheduling.sequence import RunningSequence


@dataclass(frozen=True)
class CallInFlight:
    """A launched call whose tokens the host has not read yet.

    Attributes:
        output: sampled tokens, with a leading axis of steps.
        rows: (row of the output, sequence).
        steps: tokens of each sequence, at most.
        launched_at: in seconds of `time.perf_counter`.
        decodes: whether the call only decodes; its steps are timed.
    """

    output: SamplerOutput
    rows: tuple[tuple[int, RunningSequence], ...]
    steps: int
    launched_at: float = 0.0
    decodes: bool = False

    def involves(self, sequences: Sequence[RunningSequence]) -> bool:
        """Whether it gives tokens of any of these sequences."""
        return any(one is other for _, one in self.rows for other in sequences)


def any_involves(
    calls: Iterable[CallInFlight], sequences: Sequence[RunningSequence] | None
) -> bool:
    """Whether any of some calls gives tokens of any of these sequences; None: of any at all."""
    return any(sequences is None or call.involves(sequences) for call in calls)

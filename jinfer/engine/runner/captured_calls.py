"""Captured activations of calls in flight: they stay on the device until the host reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jinfer.engine.scheduling.sequence import CapturedValues, RunningSequence

POSITIONS = "positions"  # among a call's captured values: the position of each row; -1: none

_AHEAD = 2  # calls whose values are not read yet, so that the host does not wait for them


@dataclass(frozen=True, eq=False)
class _Call:
    values: Mapping[str, Any]
    rows: Mapping[RunningSequence, Sequence[int]]

    def read(self) -> None:
        """Gives each sequence its values."""
        arrays = {name: np.asarray(value) for name, value in self.values.items()}
        positions = arrays.pop(POSITIONS)
        for sequence, at in self.rows.items():
            names = captured_names(sequence)
            if sequence.captured is None:
                sequence.captured = CapturedValues(names)
            # Of a call of several steps, rows are the second axis.
            own = (slice(None),) * (positions.ndim - 1) + (list(at),)
            taken = positions[own].reshape(-1)
            ends = {name: arrays[name].shape[positions.ndim :] for name in names}
            parts = {n: arrays[n][own].reshape(taken.size, *end) for n, end in ends.items()}
            sequence.captured.add(taken, parts)


@dataclass(eq=False)
class CapturedCalls:
    """The captured values of calls, until they are read."""

    _calls: deque[_Call] = field(default_factory=deque)

    def note(
        self, values: Mapping[str, Any], rows: Mapping[RunningSequence, Sequence[int]]
    ) -> None:
        """Notes a call.

        Args:
            values: by name [rows, ...] or [steps, rows, ...].
            rows: of each sequence.
        """
        wanted = {sequence: at for sequence, at in rows.items() if captured_names(sequence)}
        self._calls.append(_Call(values, wanted))
        while len(self._calls) > _AHEAD:
            self._calls.popleft().read()

    def read_of(self, sequence: RunningSequence) -> None:
        """Reads all calls that have values of a sequence."""
        for call in self._calls:
            if sequence in call.rows:
                call.read()
        self._calls = deque(call for call in self._calls if sequence not in call.rows)

    def clear(self) -> None:
        """Drops what was not read; it will be computed again."""
        self._calls.clear()


def captured_names(sequence: RunningSequence) -> tuple[str, ...]:
    """What a sequence's request wants to see."""
    use = sequence.request.activations
    return () if use is None else use.capture

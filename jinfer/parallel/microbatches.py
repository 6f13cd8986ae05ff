"""Lanes: groups of slots whose sequences go through the stages together.

Each lane has a state of its own, so that no lane waits for the tokens of another one, and all
stages have something to do. Slot s is row s // lanes of lane s % lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import Array

from jinfer.engine.runner.device_state import State

type LaneStates = tuple[State, ...]


@dataclass(frozen=True)
class LaneRows:
    """Rows of a lane's state, where the device has them."""

    lane: int
    rows: Array


@dataclass(frozen=True)
class Lanes:
    """How slots are divided among lanes.

    Attributes:
        count: of lanes.
        slots: of all lanes together.
    """

    count: int
    slots: int

    @property
    def rows(self) -> int:
        """Slots of a lane, at most."""
        return -(-self.slots // self.count)

    def of_slots(self, slots: np.ndarray) -> tuple[int, np.ndarray]:
        """The lane of some slots, which all have the same, and their rows in it.

        Below 0 is none, and stays; what is not below `slots` becomes the spare row.
        """
        real = slots[(slots >= 0) & (slots < self.slots)]
        lane = int(real[0]) % self.count if real.size else 0
        rows = np.where(slots < 0, -1, np.where(slots >= self.slots, self.rows, slots))
        inside = (slots >= 0) & (slots < self.slots)
        return lane, np.where(inside, slots // self.count, rows).astype(np.int32)

    def tables(self, lane: int, tables: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tables of a lane's rows."""

        def own(table: np.ndarray) -> np.ndarray:
            taken = table[lane :: self.count]
            return np.pad(taken, ((0, self.rows - len(taken)), (0, 0)))

        return {group: own(table) for group, table in tables.items()}

    def changed(self, states: LaneStates, lane: int, state: Any) -> LaneStates:
        """The states with a new one of a lane."""
        return (*states[:lane], state, *states[lane + 1 :])

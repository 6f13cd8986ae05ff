"""Micro-batches: groups of slots whose sequences go through the pipeline's stages together.

Each micro-batch has a sampling state of its own, so that its next step does not wait for the
tokens of another one: while one is in the second stage, another is in the first. Slot s is row
s // count of micro-batch s % count. In TOML (`partition.lanes`), in variables and in names of
threads a micro-batch is a `lane`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import Array

from jinfer.engine.runner.device_state import State
from jinfer.nn.row_edits import IMAGES

type MicroBatchStates = tuple[State, ...]


@dataclass(frozen=True)
class MicroBatchRows:
    """Rows of a micro-batch's state, in device memory."""

    lane: int
    rows: Array


@dataclass(frozen=True)
class MicroBatches:
    """How slots are divided among micro-batches.

    Attributes:
        count: number of micro-batches.
        slots: slots of all micro-batches together.
    """

    count: int
    slots: int

    @property
    def rows(self) -> int:
        """Slots of a micro-batch, at most."""
        return -(-self.slots // self.count)

    def of_slots(self, slots: np.ndarray) -> tuple[int, np.ndarray]:
        """The micro-batch that all of some slots belong to, and their rows in it.

        A negative slot means none and becomes -1; a slot number past the end becomes the spare
        row.
        """
        real = slots[(slots >= 0) & (slots < self.slots)]
        lane = int(real[0]) % self.count if real.size else 0
        rows = np.where(slots < 0, -1, np.where(slots >= self.slots, self.rows, slots))
        inside = (slots >= 0) & (slots < self.slots)
        return lane, np.where(inside, slots // self.count, rows).astype(np.int32)

    def tables(self, lane: int, tables: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The block tables of a micro-batch's rows, padded to `rows`; image rows as they are."""

        def rows_of(table: np.ndarray) -> np.ndarray:
            rows = table[lane :: self.count]
            return np.pad(rows, ((0, self.rows - len(rows)), (0, 0)))

        return {n: table if n == IMAGES else rows_of(table) for n, table in tables.items()}

    def changed(self, states: MicroBatchStates, lane: int, state: Any) -> MicroBatchStates:
        """The states with one micro-batch's replaced."""
        return (*states[:lane], state, *states[lane + 1 :])

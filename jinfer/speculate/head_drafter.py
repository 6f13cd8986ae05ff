"""A head: a few layers that draft from what the target's own layers have given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jinfer.engine.runner.compiled_programs import Program, Shape
from jinfer.engine.runner.model_runner import FEW, SIZES
from jinfer.engine.scheduling.scheduler import Running
from jinfer.sampling.sampler_chain import stage_sets
from jinfer.speculate.draft_model import DraftModel
from jinfer.speculate.other_device import PlacedPrograms


@dataclass(eq=False, kw_only=True)
class HeadModel(DraftModel):
    """Drafts with a head that follows the target.

    It is given the tokens from the second one on, each beside what the target's layers have given
    of the token before. That stands in the target's cache, so it is there whoever computed it.
    """

    def _known(self, sequence: Running) -> list[int]:
        return sequence.tokens[1:]

    def _after(self, sequence: Running, chain: list[int]) -> list[int]:
        # What stands after it was computed beside the head's own vectors.
        return sequence.tokens[1:]

    def _catch_up(self, sequence: Running) -> bool:
        return len(sequence.tokens) > 1 and super()._catch_up(sequence)

    def _enter(self, sequence: Running, more: list[int]) -> None:
        row = self.target.samplers.row(sequence, self.programs.sizes.context, more, first=1)
        self._state = self.programs.get(Shape("admit"))(self.state, row, np.int32(sequence.slot))

    def _compute(self, sequence: Running, begin: int, end: int) -> None:
        while begin < end:
            count = min(end - begin, SIZES[-1])
            size = next(size for size in (*FEW, *SIZES) if size >= count)
            rows, positions = (np.full(size, -1, np.int32) for _ in range(2))
            rows[:count], positions[:count] = sequence.slot, range(begin, begin + count)
            given = (rows, positions, self.tables(), self._vectors(rows, positions))
            program = self.programs.get(Shape("absorb", size))
            self.keep_cache(program(self.leaves, self.cache, self.state, *given))
            begin += count

    def _run(self, sequences: Sequence[Running], levels: int) -> np.ndarray:
        count = self.row_count(len(sequences))
        rows, positions = (np.full(count, -1, np.int32) for _ in range(2))
        rows[: len(sequences)] = [s.slot for s in sequences]
        positions[: len(sequences)] = [len(s.tokens) - 2 for s in sequences]
        program = self.programs.get(
            Shape("lead", count, stages=self.target.samplers.stages(sequences))
        )
        given = (rows, self.tables(), np.int32(levels), self._vectors(rows, positions))
        cache, state, found = program(self.leaves, self.cache, self.state, *given)
        self.keep_cache(cache, state)
        return np.asarray(found)

    def _vectors(self, rows: np.ndarray, positions: np.ndarray) -> Any:
        """What the target's layers have given of some tokens."""
        target = self.target
        program = target.programs.get(Shape("kept", len(rows)))
        given = (rows, positions, target.tables())
        vectors = program(target.programs.kept(target.cache), *given)
        if isinstance(self.programs, PlacedPrograms):
            return jax.device_put(vectors, self.programs.device)
        return vectors

    def announce(self) -> list[Future[Program]]:
        """As `Drafter.announce`."""
        shapes = [*self._shapes()]
        counts = sorted({shape.tokens for shape in shapes if shape.tokens})
        kept = self.target.programs.announce(Shape("kept", count) for count in counts)
        return [*self.programs.announce(shapes), *kept]

    def _shapes(self) -> Iterator[Shape]:
        slots = self.programs.sizes.slots
        yield Shape("admit")
        for size in (*FEW, *SIZES):
            yield Shape("absorb", size)
        for stages in stage_sets():
            for rows in sorted({self.row_count(n) for n in range(1, slots + 1)}):
                yield Shape("lead", rows, stages=stages)

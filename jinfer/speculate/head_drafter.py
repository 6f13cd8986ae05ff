"""EAGLE/MTP heads: a few layers that draft from the target's hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jinfer.engine.runner.compiled_programs import Program
from jinfer.engine.runner.model_runner import SIZES, SMALL_SIZES
from jinfer.engine.runner.step_key import StepKey
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.sampling.sampler_chain import stage_sets
from jinfer.speculate.draft_model import DraftModel
from jinfer.speculate.other_device import OtherDevicePrograms


@dataclass(eq=False, kw_only=True)
class HeadDrafter(DraftModel):
    """Drafts with a head that reads the target's hidden states.

    It reads the tokens from the second one on, each with the target's hidden states of the token
    before. Those are in the target's KV cache, so that prefix-cached tokens have them too.
    """

    def _known(self, sequence: RunningSequence) -> list[int]:
        return sequence.tokens[1:]

    def _after(self, sequence: RunningSequence, chain: list[int]) -> list[int]:
        # Drafted tokens were computed from the head's own hidden states, so they do not count.
        return sequence.tokens[1:]

    def _catch_up(self, sequence: RunningSequence) -> bool:
        return len(sequence.tokens) > 1 and super()._catch_up(sequence)

    def _set_slot(self, sequence: RunningSequence, more: list[int]) -> None:
        row = self.target.samplers.row(sequence, self.programs.sizes.context, more, first=1)
        self._state = self.programs.get(StepKey("set_slot"))(
            self.state, row, np.int32(sequence.slot)
        )

    def _compute(self, sequence: RunningSequence, begin: int, end: int) -> None:
        while begin < end:
            count = min(end - begin, SIZES[-1])
            size = next(size for size in (*SMALL_SIZES, *SIZES) if size >= count)
            rows, positions = (np.full(size, -1, np.int32) for _ in range(2))
            rows[:count], positions[:count] = sequence.slot, range(begin, begin + count)
            arguments = (rows, positions, self.slot_tables(), self._vectors(rows, positions))
            program = self.programs.get(StepKey("prefill_head", size))
            self.set_cache(program(self.leaves, self.cache, self.state, *arguments))
            begin += count

    def _run(self, sequences: Sequence[RunningSequence], levels: int) -> np.ndarray:
        count = self.padded_rows(len(sequences))
        rows, positions = (np.full(count, -1, np.int32) for _ in range(2))
        rows[: len(sequences)] = [s.slot for s in sequences]
        positions[: len(sequences)] = [len(s.tokens) - 2 for s in sequences]
        program = self.programs.get(
            StepKey("propose_with_head", count, stages=self.target.samplers.stages(sequences))
        )
        arguments = (rows, self.slot_tables(), np.int32(levels), self._vectors(rows, positions))
        cache, state, proposed = program(self.leaves, self.cache, self.state, *arguments)
        self.set_cache(cache, state)
        return np.asarray(proposed)

    def _vectors(self, rows: np.ndarray, positions: np.ndarray) -> Any:
        """The target's hidden states of some tokens."""
        target = self.target
        program = target.programs.get(StepKey("gather_taps", len(rows)))
        arguments = (rows, positions, target.slot_tables())
        vectors = program(target.programs.hidden_taps(target.cache), *arguments)
        if isinstance(self.programs, OtherDevicePrograms):
            return jax.device_put(vectors, self.programs.device)
        return vectors

    def announce(self) -> list[Future[Program]]:
        """As `Drafter.announce`."""
        keys = [*self._step_keys()]
        counts = sorted({key.tokens for key in keys if key.tokens})
        taps = self.target.programs.announce(StepKey("gather_taps", count) for count in counts)
        return [*self.programs.announce(keys), *taps]

    def _step_keys(self) -> Iterator[StepKey]:
        slots = self.programs.sizes.slots
        yield StepKey("set_slot")
        for size in (*SMALL_SIZES, *SIZES):
            yield StepKey("prefill_head", size)
        for stages in stage_sets():
            for rows in sorted({self.padded_rows(n) for n in range(1, slots + 1)}):
                yield StepKey("propose_with_head", rows, stages=stages)

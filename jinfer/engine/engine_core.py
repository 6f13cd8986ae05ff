"""Engine core: model runner, scheduler and samplers, which the step loop and its parts share.

Search drivers, guided decoding, speculative decoding and forward passes launch calls between those
of the step loop. They depend on `EngineCore`, not on the loop, `jinfer.engine.engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import Array

from jinfer.engine.engine_stats import DraftCounts
from jinfer.engine.requests import Failed, RequestError, Token
from jinfer.engine.runner.captured_calls import CapturedCalls
from jinfer.engine.runner.edit_tables import StepTaps, taps_of
from jinfer.engine.runner.in_flight import CallInFlight
from jinfer.engine.runner.model_runner import ModelRunner
from jinfer.engine.runner.sampler_output import CALL_SECONDS, SamplerOutput
from jinfer.engine.runner.step_key import StepKey
from jinfer.engine.sampler_state import SamplerStates
from jinfer.engine.scheduling.scheduler import Scheduler
from jinfer.engine.scheduling.sequence import RunningSequence


@dataclass(kw_only=True)
class EngineCore(ModelRunner, ABC):
    """A model runner with a scheduler and the calls in flight.

    Attributes:
        scheduler: decides which sequences are computed next.
        call_seconds, step_seconds: duration of the last call, and of a step of the last call that
            only decoded.
        contended: whether other processes compute on the same cores, so that calls are short; may
            be set by any thread.
        drafted: counts of drafted tokens.
        samplers: sampling parameters and sampler state of each request.
        captured: activations of calls that the host has not read.
    """

    scheduler: Scheduler
    call_seconds: float = 0.0
    step_seconds: float = CALL_SECONDS
    contended: bool = False
    drafted: DraftCounts = field(default_factory=DraftCounts)
    samplers: SamplerStates = field(default_factory=SamplerStates)
    captured: CapturedCalls = field(default_factory=CapturedCalls)
    _sequences: dict[int, RunningSequence] = field(default_factory=dict)
    _in_flight: deque[CallInFlight] = field(default_factory=deque)

    @abstractmethod
    def read_all(self, of: Sequence[RunningSequence] | None = None) -> Iterator[Token | Failed]:
        """Reads the tokens of all calls in flight.

        Args:
            of: reads only up to the last call that gives tokens of these sequences.
        """

    def is_running(self, sequence: RunningSequence) -> bool:
        """Whether a sequence has a slot and its request has not ended."""
        return (
            self._sequences.get(sequence.request.id) is sequence
            and sequence.block_tables is not None
        )

    def sequence(self, request: int) -> RunningSequence | None:
        """The sequence of a request; None if it is not in the engine."""
        return self._sequences.get(request)

    def set_slot(self, sequence: RunningSequence) -> None:
        """Uploads a sequence's tokens, limits and sampler state to its slot of the device state."""
        row = self.samplers.row(sequence, self.programs.sizes.context)
        program = self.programs.get(StepKey("set_slot"))
        self._state = program(self.state, row, np.int32(sequence.slot))

    def compute_logits(
        self, batch: Sequence[tuple[int, int]], last: Sequence[int]
    ) -> tuple[Array, Array]:
        """Logits after some tokens, and the state rows that they belong to: see `steps.logits`.

        Args:
            batch: slot and position of each token; position -1: the last token, which only the
                device may know.
            last: indices of the tokens after which one is sampled.
        """
        size = self.batch_size(len(batch))
        chosen = self.sampled_rows(size, len(last))
        using = self._using_activations(slot for slot, _ in batch)
        taps = self.taps_of(using)
        at, picked = np.full((2, size), -1, np.int32), np.full(chosen, -1, np.int32)
        at[:, : len(batch)] = np.array(batch, np.int32).T
        picked[: len(last)] = last
        program = self.programs.get(StepKey("logits", size, chosen, taps=taps))
        arguments = (at[0], at[1], self.slot_tables(taps, using), picked)
        self._cache, out, rows, *more = program(self.leaves, self.cache, self.state, *arguments)
        for captured in more:
            own = {s: [i for i, (slot, _) in enumerate(batch) if slot == s.slot] for s in using}
            self.captured.note(captured, own)
        return out, rows

    def _using_activations(self, slots: Iterable[int]) -> list[RunningSequence]:
        """The sequences in some slots that capture or edit activations."""
        some = [s for s in self.scheduler.running if s.request.activations is not None]
        here = set(slots) if some else set()
        return [s for s in some if s.slot in here]

    def sample(
        self,
        logits: Array,
        rows: Array | np.ndarray,
        sequences: Sequence[RunningSequence],
        mask: np.ndarray | None = None,
    ) -> SamplerOutput:
        """Samples the next tokens of some sequences: see `steps.sample_logits`."""
        count = logits.shape[0]
        stages, extras = self.samplers.stages(sequences), self.samplers.extras(sequences)
        key = StepKey("sample", chosen=count, stages=stages, extras=extras)
        program = self.programs.get(key)
        guided = np.bool_(mask is not None)
        mask = np.zeros((count, self.programs.words), np.uint32) if mask is None else mask
        self._state, output = program(self.state, logits, rows, mask, guided)
        return output

    def record_in_flight(self, call: CallInFlight) -> None:
        """Records a launched call, whose tokens `read_all` reads later."""
        for _, sequence in call.rows:
            sequence.in_flight += call.steps
        self._in_flight.append(call)

    def preempt_for(self, sequence: RunningSequence) -> list[Token | Failed]:
        """Preempts the latest sequence, so that a host-driven one gets blocks; it may be itself.

        Returns:
            Tokens that had to be read before; a failure, if no other sequence has blocks.
        """
        events: list[Token | Failed] = list(self.read_all())
        last = max(self.scheduler.running, key=lambda s: s.priority_key)
        if len(self.scheduler.running) == 1 and not self.scheduler.slotless:
            error = RequestError("the cache has too few blocks for this; set engine.kv_tokens")
            events.append(Failed(sequence.request.id, error))
        self.scheduler.preempt(last)
        return events

    def slot_tables(
        self, taps: StepTaps | None = None, using: Sequence[RunningSequence] = ()
    ) -> dict[str, Any]:
        """The block table of each slot's sequence, by group; and tables of edits, if there are any.

        Args:
            taps: what the step captures and edits.
            using: the sequences for which it does.
        """
        slots = self.programs.sizes.slots
        tables = [(s.slot, s.block_tables) for s in self.scheduler.running if s.block_tables]
        edits = self.edits_of_rows(taps, using, slots, range(slots))
        return self.block_tables(slots, tables) | edits

    def taps_of(self, sequences: Iterable[RunningSequence]) -> StepTaps | None:
        """What a step of some sequences captures and edits; None: nothing."""
        return taps_of(sequence.request.activations for sequence in sequences)

    def edits_of_rows(
        self,
        taps: StepTaps | None,
        using: Iterable[RunningSequence],
        rows: int,
        owners: Iterable[int],
    ) -> dict[str, Any]:
        """The tables of edits of a step, to stand among block tables; none without taps.

        Args:
            taps, using: as of `slot_tables`.
            rows: of the block tables.
            owners: the slot of each row.
        """
        if taps is None:
            return {}
        uses = {s.slot: s.request.activations for s in using}
        of_rows = ((row, uses.get(slot)) for row, slot in enumerate(owners))
        return self.edit_tables(taps, rows, [(row, use) for row, use in of_rows if use])

    def batch_size(self, tokens: int) -> int:
        """Size of the smallest compiled batch that has room for so many tokens."""
        return next(size for size in self.scheduler.sizes if size >= tokens)

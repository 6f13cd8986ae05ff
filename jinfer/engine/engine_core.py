"""Engine core: model runner, scheduler and samplers, which the step loop and its parts share.

Search drivers, guided decoding, speculative decoding and forward passes launch calls between those
of the step loop. They depend on `EngineCore`, not on the loop, `jinfer.engine.engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax import Array

from jinfer.engine.engine_stats import DraftCounts
from jinfer.engine.requests import Failed, RequestError, Token
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
        drafted: counts of drafted tokens.
        samplers: sampling parameters and sampler state of each request.
    """

    scheduler: Scheduler
    call_seconds: float = 0.0
    step_seconds: float = CALL_SECONDS
    drafted: DraftCounts = field(default_factory=DraftCounts)
    samplers: SamplerStates = field(default_factory=SamplerStates)
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
        at, picked = np.full((2, size), -1, np.int32), np.full(chosen, -1, np.int32)
        at[:, : len(batch)] = np.array(batch, np.int32).T
        picked[: len(last)] = last
        program = self.programs.get(StepKey("logits", size, chosen))
        arguments = (at[0], at[1], self.slot_tables(), picked)
        self._cache, out, rows = program(self.leaves, self.cache, self.state, *arguments)
        return out, rows

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

    def slot_tables(self) -> dict[str, np.ndarray]:
        """The block table of each slot's sequence, by group."""
        tables = [(s.slot, s.block_tables) for s in self.scheduler.running if s.block_tables]
        return self.block_tables(self.programs.sizes.slots, tables)

    def batch_size(self, tokens: int) -> int:
        """Size of the smallest compiled batch that has room for so many tokens."""
        return next(size for size in self.scheduler.sizes if size >= tokens)

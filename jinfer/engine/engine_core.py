"""What the step loop and all that takes part in it share: the device, the scheduler, samplers.

Search drivers, grammars, speculators and forward passes launch calls of their own between those of
the step loop. They do it through `EngineCore`, so that they know nothing of the loop.
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
from jinfer.engine.runner.compiled_programs import Shape
from jinfer.engine.runner.in_flight import Launched
from jinfer.engine.runner.model_runner import Device
from jinfer.engine.runner.sampler_output import CALL_SECONDS, Chosen
from jinfer.engine.sampler_state import Samplers
from jinfer.engine.scheduling.scheduler import Running, Scheduler


@dataclass(kw_only=True)
class EngineCore(Device, ABC):
    """A model runner with a scheduler, and the calls whose tokens the host has not read yet.

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
    samplers: Samplers = field(default_factory=Samplers)
    _sequences: dict[int, Running] = field(default_factory=dict)
    _launched: deque[Launched] = field(default_factory=deque)

    @abstractmethod
    def read_all(self, of: Sequence[Running] | None = None) -> Iterator[Token | Failed]:
        """Reads the tokens of all calls in flight.

        Args:
            of: reads only up to the last call that gives tokens of these sequences.
        """

    def runs(self, sequence: Running) -> bool:
        """Whether it was admitted, and its request goes on."""
        return self._sequences.get(sequence.request.id) is sequence and sequence.held is not None

    def sequence(self, request: int) -> Running | None:
        """A request on its way; None for one that is not."""
        return self._sequences.get(request)

    def enter(self, sequence: Running) -> None:
        """Tells the device what is known of a sequence."""
        row = self.samplers.row(sequence, self.programs.sizes.context)
        program = self.programs.get(Shape("admit"))
        self._state = program(self.state, row, np.int32(sequence.slot))

    def compute_logits(
        self, places: Sequence[tuple[int, int]], last: Sequence[int]
    ) -> tuple[Array, Array]:
        """Logits after some tokens, and the rows of the state they are of: see `steps.logits`.

        Args:
            places: slot and position of each token; position -1: the last one known.
            last: the tokens, by their place in the list, after which one is to be chosen.
        """
        size = self.size_of(len(places))
        chosen = self.chosen_count(size, len(last))
        at, picked = np.full((2, size), -1, np.int32), np.full(chosen, -1, np.int32)
        at[:, : len(places)] = np.array(places, np.int32).T
        picked[: len(last)] = last
        program = self.programs.get(Shape("logits", size, chosen))
        given = (at[0], at[1], self.tables(), picked)
        self._cache, out, rows = program(self.leaves, self.cache, self.state, *given)
        return out, rows

    def choose(
        self,
        logits: Array,
        rows: Array | np.ndarray,
        sequences: Sequence[Running],
        mask: np.ndarray | None = None,
    ) -> Chosen:
        """The next tokens of some sequences: see `steps.choose`."""
        count = logits.shape[0]
        shape = Shape("choose", chosen=count, stages=self.samplers.stages(sequences))
        program = self.programs.get(shape)
        guided = np.bool_(mask is not None)
        mask = np.zeros((count, self.programs.words), np.uint32) if mask is None else mask
        self._state, chosen = program(self.state, logits, rows, mask, guided)
        return chosen

    def note(self, launched: Launched) -> None:
        """Keeps in mind a call whose tokens are to be read."""
        for _, sequence in launched.rows:
            sequence.unread += launched.steps
        self._launched.append(launched)

    def free_blocks(self, sequence: Running) -> list[Token | Failed]:
        """Preempts somebody for a driven sequence, or the sequence itself if it came last.

        Returns:
            Tokens that had to be read before; that the sequence failed, if nobody else holds any.
        """
        events: list[Token | Failed] = list(self.read_all())
        last = max(self.scheduler.running, key=lambda s: s.order)
        if len(self.scheduler.running) == 1 and not self.scheduler.apart:
            error = RequestError("the cache has too few blocks for this; set engine.kv_tokens")
            events.append(Failed(sequence.request.id, error))
        self.scheduler.preempt(last)
        return events

    def tables(self) -> dict[str, np.ndarray]:
        """Where the blocks of each slot's sequence are, by group."""
        held = [(s.slot, s.held) for s in self.scheduler.running if s.held]
        return self.tables_of(self.programs.sizes.slots, held)

    def size_of(self, tokens: int) -> int:
        """The tokens of the smallest program that takes so many."""
        return next(size for size in self.scheduler.sizes if size >= tokens)

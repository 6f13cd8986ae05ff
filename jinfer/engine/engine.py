"""The step loop: requests are admitted, computed in flat batches, and their tokens come out.

All that a step needs of the step before stays on the device, so call n + 1 is launched before the
host has seen the tokens of call n; a token computed for a request that has meanwhile ended is
dropped. Where steps are short and nobody waits, a call takes several.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from jinfer.engine.engine_core import EngineCore
from jinfer.engine.requests import Failed, Request, Token
from jinfer.engine.runner.compiled_programs import Shape
from jinfer.engine.runner.device_state import Choice
from jinfer.engine.runner.in_flight import Launched, any_for
from jinfer.engine.runner.model_runner import token_of
from jinfer.engine.runner.sampler_output import Chosen, fitting
from jinfer.engine.scheduling.scheduler import Plan, Running
from jinfer.engine.search.guided_decoding import Guides
from jinfer.engine.search.search_driver import Driver
from jinfer.engine.speculator_protocol import Speculator
from jinfer.ops.attention.kv_cache import BLOCK
from jinfer.ops.interrupt import Flag

if TYPE_CHECKING:
    from jinfer.sampling.structured import Matcher


@dataclass(kw_only=True)
class Engine(EngineCore):
    """Runs one model. Not to be used from several threads: see `jinfer.engine.engine_thread`.

    Attributes:
        speculator: drafts tokens, if there is one.
        interrupt: ends decoding calls, also those that have not begun; any thread may raise it.
        guides: grammars of the requests that have one.
    """

    speculator: Speculator | None = None
    interrupt: Flag = field(default_factory=Flag)
    guides: Guides = field(default_factory=Guides)
    _drivers: dict[int, Driver] = field(default_factory=dict)
    _involved: list[int] = field(default_factory=list)
    _events: list[Token | Failed] = field(default_factory=list)
    _arrivals: int = 0
    _last_read: float = 0.0
    _flag: np.int32 = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler.on_release = self._released
        self._flag = np.int32(self.interrupt.number)

    def release(self) -> None:
        """As `Device.release`."""
        super().release()
        self._launched.clear()
        self.samplers.clear()
        if self.speculator is not None:
            self.speculator.release()
            self.speculator = None
        self.guides.close()
        # Else the two keep each other.
        self.scheduler.on_release = lambda _: None

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._sequences)

    def submit(
        self,
        request: Request,
        choice: Choice,
        driver: Driver | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        """Queues a request; it runs until `finish`. Raises `QueueFullError`.

        Args:
            choice: how its tokens are chosen.
            driver: of a request whose tokens the host chooses.
            matcher: of one whose tokens have to match a grammar.
        """
        sequence = Running(
            request,
            self._arrivals,
            list(request.prompt),
            seed=request.seed(self.model.steady),
            driven=driver is not None,
            guided=matcher is not None,
        )
        self.scheduler.submit(sequence)
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self.samplers.choices[request.id] = choice
        if driver is not None:
            self._drivers[request.id] = driver
        if matcher is not None:
            never = self.model.never
            self.guides.begin(sequence, matcher, choice, never, self.programs.words)

    def finish(self, request: int) -> Running | None:
        """Ends a request, wherever it is; what it held is free at once."""
        sequence = self._sequences.pop(request, None)
        if sequence is None:
            return None
        self._describe(sequence)
        self.scheduler.drop(sequence)
        self.samplers.forget(request)
        self.guides.end(request)
        if self.speculator is not None:
            self.speculator.end(sequence)
        if (driver := self._drivers.pop(request, None)) is not None:
            driver.end(request)
        return sequence

    def step(self) -> list[Token | Failed]:
        """Plans and launches one call, and returns the tokens of the call before.

        What interrupts it may leave a cache that was donated and not given back: whoever holds
        blocks has then to be computed again, see `recover`.
        """
        self._involved = [sequence.request.id for sequence in self.scheduler.running]
        drivers = dict.fromkeys(self._drivers.values())
        tokens = [*self._flushed(), *(token for driver in drivers for token in driver.settle(self))]
        tokens += [*self.guides.settle(self), *self.guides.choose(self)]
        drafts, calls = self.speculator, self._launched
        while drafts and any_for(calls, own := self.scheduler.upcoming()) and drafts.waits(own):
            tokens += [*self.read_all(own), *self.guides.settle(self)]
        plan = self._plan()
        while plan.wait:
            # Read before anything is preempted; what was admitted is on its way already.
            self._admit(plan)
            tokens += self.read_all()
            plan = self._plan()
        self._admit(plan)
        self._involved += [sequence.request.id for sequence in plan.admitted]
        launched = self._launch(plan)
        for driver in drivers:
            tokens += driver.advance(self, self._ready(driver))
        # Masks need the tokens before; the device computes the logits that they are for.
        most = self.scheduler.calls_ahead(launched, len(self._launched))
        while len(self._launched) > (0 if self.guides.due else most):
            tokens += self._read(self._launched.popleft())
        return [*tokens, *self.guides.settle(self), *self._flushed()]

    def _flushed(self) -> list[Token | Failed]:
        events, self._events = self._events, []
        return events

    def _ready(self, driver: Driver) -> list[Running]:
        """A driver's sequences that wait for it, those that came first first."""
        own = [s for s in self.scheduler.running if self._drivers.get(s.request.id) is driver]
        return sorted((s for s in own if not s.in_prompt), key=lambda s: s.order)

    def _plan(self) -> Plan:
        most = min(self.programs.most_steps, fitting(self.step_seconds))
        return self.scheduler.plan(self.speculator.steps(most) if self.speculator else most)

    def recover(self) -> list[int]:
        """After a failed step: forgets what the device had.

        Returns:
            The requests that took part. Those of them that are not ended with `finish` are computed
            again from the tokens that are known.
        """
        self._launched.clear()
        self.guides.computed = None
        self._cache = self._state = None
        if self.speculator is not None:
            self.speculator.reset()
        for sequence in list(self.scheduler.running):
            sequence.unread = 0
            self.scheduler.preempt(sequence)
        self.scheduler.blocks.forget_all()
        return self._involved

    def _released(self, sequence: Running) -> None:
        """A sequence is about to give its blocks back."""
        self.guides.drop(sequence)
        if (driver := self._drivers.get(sequence.request.id)) is not None:
            driver.drop(self, sequence.request.id)
        if self.speculator is not None:
            self.speculator.drop(self, sequence)

    def _admit(self, plan: Plan) -> None:
        self.copy(plan.copies)
        for sequence in plan.admitted:
            held, request = sequence.held, sequence.request
            sequence.admitted = sequence.admitted or time.perf_counter()
            assert held is not None, "it was admitted"
            if request.encoder and not held.filled:
                self.fill(held, request.encoder)
                self.scheduler.blocks.describe_encoder(held, request.encoder)
            self.enter(sequence)

    def _launch(self, plan: Plan) -> bool:
        """Launches what is planned; whether its tokens will have to be read."""
        if plan.empty:
            return False
        for sequence in (*plan.decoding, *(chunk.sequence for chunk in plan.chunks)):
            assert sequence.held is not None, "it is planned"
            self.guides.drop(sequence)
            first = min(sequence.computed, len(sequence.tokens) - 1)
            self.scheduler.blocks.slide(sequence.held, first)
        if self.speculator is not None and self.speculator.launch(self, plan, self.guides):
            return True
        guided = any(sequence.guided for sequence in plan.decoding)
        return self._mixed(plan) if plan.chunks or guided else self._decode(plan)

    def _mixed(self, plan: Plan) -> bool:
        rows = [(s.slot, -1) for s in plan.decoding]
        chosen, last = [*plan.decoding], [*range(len(rows))]
        for chunk in plan.chunks:
            places = range(chunk.start, chunk.start + chunk.count)
            rows += [(chunk.sequence.slot, position) for position in places]
            if chunk.chooses:
                chosen.append(chunk.sequence)
                last.append(len(rows) - 1)
        begun = time.perf_counter()
        logits, which = self.compute_logits(rows, last)
        for chunk in plan.chunks:
            chunk.sequence.computed += chunk.count
            self._describe(chunk.sequence)
        if any(sequence.guided for sequence in chosen):
            self.guides.computed = logits, tuple(enumerate(chosen))
            return False
        if not chosen:
            return False
        result = self.choose(logits, which, chosen)
        self.note(Launched(result, tuple(enumerate(chosen)), 1, begun))
        return True

    def _decode(self, plan: Plan) -> bool:
        """Launches a call; not while its program is compiled and there are tokens to give out."""
        count = self.row_count(len(plan.decoding))
        shape = Shape("decode", count, stages=self.samplers.stages(plan.decoding))
        if self._launched and not self.programs.ready(shape):
            return False
        rows = np.full(count, -1, np.int32)
        rows[: len(plan.decoding)] = [s.slot for s in plan.decoding]
        program, tables = self.programs.get(shape), self.tables()
        begun = time.perf_counter()
        self._cache, self._state, result = program(
            self.leaves, self.cache, self.state, rows, tables, np.int32(plan.steps), self._flag
        )
        chosen = tuple(enumerate(plan.decoding))
        self.note(Launched(result, chosen, plan.steps, begun, decodes=True))
        return True

    def read_all(self, of: Sequence[Running] | None = None) -> Iterator[Token | Failed]:
        """Reads all that was launched, or all up to the last call for some sequences."""
        while any_for(self._launched, of):
            yield from self._read(self._launched.popleft())

    def _read(self, launched: Launched) -> Iterator[Token | Failed]:
        tokens = np.asarray(launched.chosen.tokens)
        self._time(launched, tokens)
        for row, sequence in launched.rows:
            sequence.unread -= launched.steps
            if not self.runs(sequence):
                continue  # it has ended meanwhile
            count = int(np.count_nonzero(tokens[:, row] >= 0))
            if count:
                self.samplers.note(sequence.request.id, launched, count - 1, row)
            origins: list[str] = []
            if self.speculator is not None:
                ids = tokens[:count, row].tolist()
                origins = self.speculator.read(self, launched, sequence, ids)
            origins += [""] * (count - len(origins))
            new = self._take(sequence, launched.chosen, row, origins)
            if not sequence.guided:
                yield from new
                continue
            self.guides.take(sequence, list(new), self.programs.words)

    def _take(
        self, sequence: Running, chosen: Chosen, row: int, origins: Sequence[str]
    ) -> Iterator[Token]:
        """The first new tokens of a sequence, as many as have origins; it has them from now on."""
        for step, origin in enumerate(origins):
            token = token_of(chosen, step, row, sequence.request)
            sequence.tokens.append(token.id)
            yield replace(token, origin=origin) if origin else token
        if not sequence.unread:
            before = sequence.computed // BLOCK
            sequence.computed = len(sequence.tokens) - 1
            if sequence.computed // BLOCK > before:
                self._describe(sequence)

    def _describe(self, sequence: Running) -> None:
        """Notes what the blocks of a sequence hold, as far as its tokens are known."""
        if sequence.held is not None and sequence.request.reuse:
            # Of tokens that are not read yet nothing is known, though they are computed.
            computed = min(sequence.computed, len(sequence.tokens))
            self.scheduler.blocks.describe(sequence.held, sequence.tokens, computed)

    def _time(self, launched: Launched, tokens: np.ndarray) -> None:
        now = time.perf_counter()
        steps = int(np.count_nonzero((tokens >= 0).any(axis=1)))
        self.call_seconds = max(1e-6, now - max(launched.at, self._last_read))
        if launched.decodes and steps:
            self.step_seconds = self.call_seconds / steps
        self._last_read = now

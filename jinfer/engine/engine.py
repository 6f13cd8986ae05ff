"""Engine: the step loop of continuous batching. Each step plans, launches and reads a call.

Asynchronous: all that a step needs from the step before stays on the device, so call n + 1 is
launched before the host has seen the tokens of call n. A token of a request that has meanwhile
ended is dropped. Multi-step: a call computes several steps when they are short and no request
waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jinfer.engine.engine_stats import DraftCounts
from jinfer.engine.requests import Failed, NotFiniteError, Request, RequestError, Token
from jinfer.engine.runner.compiled_programs import Program
from jinfer.engine.runner.device_state import SamplingRow
from jinfer.engine.runner.edit_tables import StepTaps
from jinfer.engine.runner.forward_passes import NoRoomError
from jinfer.engine.runner.in_flight import CallInFlight, any_involves
from jinfer.engine.runner.model_runner import ModelRunner, make_token
from jinfer.engine.runner.sampler_output import CALL_SECONDS, SamplerOutput, steps_that_fit
from jinfer.engine.runner.step_key import StepKey
from jinfer.engine.scheduling.border_snapshots import (
    copies_for_waiting,
    keep_borders,
    reserve_borders,
)
from jinfer.engine.scheduling.scheduler import Scheduler
from jinfer.engine.scheduling.sequence import RunningSequence
from jinfer.engine.scheduling.step_plan import StepPlan
from jinfer.engine.search.guided_decoding import Guides
from jinfer.engine.search.search_driver import SearchDriver
from jinfer.ops.attention.kv_cache import BLOCK
from jinfer.ops.cpu_library import Flag
from jinfer.sampling.samplers import NOT_FINITE

if TYPE_CHECKING:
    from jinfer.engine.offload.prefix_offload import PrefixOffload
    from jinfer.sampling.structured import Matcher


class Speculator(Protocol):
    """Speculative decoding of an engine; implemented in `jinfer.speculate`."""

    def announce(self) -> list[Future[Program]]:
        """Start compiling all programs that it may need."""

    def needs_tokens(self, sequences: Sequence[RunningSequence]) -> bool:
        """Whether all tokens of the sequences have to be read before the next call is planned."""

    def max_steps(self, limit: int) -> int:
        """Steps that a call without drafts may take, at most `limit`."""

    def launch(self, plan: StepPlan, guides: Guides) -> bool:
        """Launch a call that verifies drafts for the planned sequences; False: there are none."""

    def observe(self, call: CallInFlight, sequence: RunningSequence, ids: list[int]) -> list[str]:
        """Observe the new tokens of a sequence before they are appended.

        Returns:
            The draft source of each accepted token; the first tokens are the accepted ones.
        """

    def release_blocks(self, sequence: RunningSequence) -> None:
        """Release blocks of a sequence's drafts, before the sequence's own are freed."""

    def forget(self, sequence: RunningSequence) -> None:
        """Drop the state of a request that has ended."""

    def reset(self) -> None:
        """Discard device state after a failed step."""

    def release(self) -> None:
        """Free memory; nothing is drafted afterwards."""


@dataclass(kw_only=True)
class Engine:
    """Runs one model: a scheduler chooses what a model runner computes.

    Not to be used from several threads: see `jinfer.engine.engine_thread`.

    Attributes:
        runner: weights, KV cache, device state and compiled programs.
        scheduler: decides which sequences are computed next.
        speculator: speculative decoding, if it is on.
        interrupt: ends decoding calls early, also those that have not begun; any thread may set it.
        guides: guided decoding: the requests' grammars.
        adapters: slot of each LoRA adapter -> the digest of its contents.
        offload: prefix cache offload, if it is on.
        weights_key: a digest of the weights' source and of how they are stored.
        slot_prefixes: slot -> `BlockTables.seed` and tokens of the sequence that had it last.
        call_seconds, step_seconds: duration of the last call, and of a step of the last call that
            only decoded.
        contended: whether other processes compute on the same cores, so that calls are short; any
            thread may set it.
        drafted: counts of drafted tokens.
    """

    runner: ModelRunner
    scheduler: Scheduler
    speculator: Speculator | None = None
    interrupt: Flag = field(default_factory=Flag)
    guides: Guides = field(default_factory=Guides)
    adapters: dict[int, bytes] = field(default_factory=dict)
    offload: PrefixOffload | None = None
    weights_key: str = ""
    slot_prefixes: dict[int, tuple[bytes, list[int]]] = field(default_factory=dict)
    call_seconds: float = 0.0
    step_seconds: float = CALL_SECONDS
    contended: bool = False
    drafted: DraftCounts = field(default_factory=DraftCounts)
    _sequences: dict[int, RunningSequence] = field(default_factory=dict)
    _in_flight: deque[CallInFlight] = field(default_factory=deque)
    _drivers: dict[int, SearchDriver] = field(default_factory=dict)
    _thinking: dict[int, RunningSequence] = field(default_factory=dict)
    _in_step: list[int] = field(default_factory=list)
    _arrivals: int = 0
    _last_read: float = 0.0
    _flag: np.int32 = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler.on_release = self._on_release
        self._flag = np.int32(self.interrupt.number)

    def release(self) -> None:
        """Free weights, KV cache, device state and programs; nothing runs afterwards."""
        if self.offload is not None:
            self.offload.close()
            self.offload = None
        self.runner.release()
        self._in_flight.clear()
        if self.speculator is not None:
            self.speculator.release()
            self.speculator = None
        self.guides.close()
        # Breaks reference cycles.
        self.scheduler.on_release = lambda _: None
        self.scheduler.fetching = lambda _: False

    @property
    def busy(self) -> bool:
        """Whether there are requests, waiting or running."""
        return bool(self._sequences)

    def submit(
        self,
        request: Request,
        choice: SamplingRow,
        driver: SearchDriver | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        """Queues a request; it runs until `finish`. Raises `QueueFullError`.

        Args:
            choice: sampling parameters and the sampler's initial state.
            driver: of a request whose search the host drives.
            matcher: the grammar of a guided request.
        """
        use = request.adapter
        if use is not None and self.adapters.get(use.slot) != use.digest:
            raise RequestError(f"the adapter {use.name!r} was unloaded meanwhile")
        sequence = RunningSequence(
            request,
            self._arrivals,
            list(request.prompt),
            seed=request.seed(self.runner.model.steady),
            host_driven=driver is not None,
            guided=matcher is not None,
        )
        self.scheduler.submit(sequence)
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self.runner.samplers.choices[request.id] = choice
        if driver is not None:
            self._drivers[request.id] = driver
        if sequence.thought is not None:
            self._thinking[request.id] = sequence
        if matcher is not None:
            never, words = self.runner.model.never, self.runner.programs.words
            self.guides.add(sequence, matcher, choice, never, words)

    def adapter_slots_used(self) -> set[int]:
        """Slots of LoRA adapters that requests are computed with, waiting or running."""
        uses = (sequence.request.adapter for sequence in self._sequences.values())
        return {use.slot for use in uses if use is not None}

    def finish(self, request: int) -> RunningSequence | None:
        """Ends a request, waiting or running; its blocks and its slot are free at once."""
        sequence = self._sequences.pop(request, None)
        if sequence is None:
            return None
        if self.runner.samplers.has_ended(sequence):
            # Calls in flight compute nothing of it, and leave its states as they are.
            sequence.in_flight, sequence.computed = 0, len(sequence.tokens) - 1
        self._register_blocks(sequence)
        if self.offload is not None:
            self.offload.finish(sequence)
        self.runner.captured.read_of(sequence)
        self.scheduler.remove(sequence)
        self.runner.samplers.forget(request)
        self.guides.remove(request)
        if self.speculator is not None:
            self.speculator.forget(sequence)
        self._drivers.pop(request, None)
        self._thinking.pop(request, None)
        return sequence

    def step(self) -> list[Token | Failed]:
        """Plans and launches one call, and returns the tokens of the call before.

        After an exception the KV cache may have been donated and lost: see `recover`.
        """
        self._in_step = [sequence.request.id for sequence in self.scheduler.running]
        if self.offload is not None:
            self.offload.begin_step()
        tokens = self._collect_masks()
        for sequence in self._thinking.values():
            tokens += end_thought(self.runner, sequence)
        tokens += self._sample_guided()
        speculator, calls = self.speculator, self._in_flight
        while (
            speculator
            and any_involves(calls, upcoming := self.scheduler.upcoming())
            and speculator.needs_tokens(upcoming)
        ):
            tokens += [*self.read_all(upcoming), *self._collect_masks()]
        plan = self._plan()
        while plan.must_read:
            # Admitted sequences are uploaded now; calls are read before any preemption.
            self._admit(plan)
            tokens += self.read_all()
            plan = self._plan()
        self._admit(plan)
        self._in_step += [sequence.request.id for sequence in plan.admitted]
        launched = self._launch(plan)
        for request, driver in self._drivers.items():
            sequence = self._sequences[request]
            if sequence.block_tables is not None and not sequence.prefilling:
                tokens += self._advance_search(driver, sequence)
        # Grammar masks need the tokens of the calls in flight.
        ahead = self.scheduler.calls_ahead(launched, len(self._in_flight))
        while len(self._in_flight) > (0 if self.guides.must_read else ahead):
            tokens += self._read_call(self._in_flight.popleft())
        if self.offload is not None:
            self.offload.end_step(idle=plan.empty and not self._in_flight and not tokens)
        return [*tokens, *self._collect_masks()]

    def _plan(self) -> StepPlan:
        fit = steps_that_fit(self.step_seconds, self.contended)
        steps = min(self.runner.programs.max_steps, fit)
        return self.scheduler.plan(self.speculator.max_steps(steps) if self.speculator else steps)

    def _collect_masks(self) -> list[Token | Failed]:
        return self.guides.collect(self.runner, self.scheduler.running)

    def _sample_guided(self) -> list[Token | Failed]:
        """Sample from the logits whose grammar masks are ready."""
        events, call = self.guides.sample_pending(self.runner)
        if call is not None:
            self.record_in_flight(call)
        return events

    def _advance_search(
        self, driver: SearchDriver, sequence: RunningSequence
    ) -> list[Token | Failed]:
        """One step of a search; while it lacks blocks, the latest sequence is preempted."""
        events: list[Token | Failed] = []
        while sequence.block_tables is not None:
            try:
                return [*events, *driver.advance(self.runner, self.scheduler, sequence)]
            except NoRoomError:
                events += self._preempt_for(sequence)
        return events

    def _preempt_for(self, sequence: RunningSequence) -> list[Token | Failed]:
        """Preempt the latest sequence, so that a host-driven one gets blocks; it may be itself.

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

    def recover(self) -> list[int]:
        """After a failed step: discards calls in flight, KV cache and device state.

        Returns:
            The requests in the step. Those that are not ended with `finish` are recomputed from
            their known tokens.
        """
        self._in_flight.clear()
        self.guides.pending = None
        self.runner.reset()
        if self.speculator is not None:
            self.speculator.reset()
        if self.offload is not None:
            self.offload.reset()
        for sequence in list(self.scheduler.running):
            sequence.in_flight = 0
            self.scheduler.preempt(sequence)
        self.scheduler.blocks.clear()
        return self._in_step

    def _on_release(self, sequence: RunningSequence) -> None:
        """Before a sequence's blocks are freed: its logits, search state and drafts go too."""
        self.guides.discard_logits(sequence)
        known = sequence.cache_ids[: sequence.computed]
        self.slot_prefixes[sequence.known_slot] = sequence.seed, known
        if (driver := self._drivers.get(sequence.request.id)) is not None:
            driver.release_blocks(self.scheduler)
        if self.speculator is not None:
            self.speculator.release_blocks(sequence)

    def _admit(self, plan: StepPlan) -> None:
        self.runner.copy_blocks(plan.copies)
        for sequence in plan.admitted:
            tables, request = sequence.block_tables, sequence.request
            sequence.admitted = sequence.admitted or time.perf_counter()
            assert tables is not None, "it was admitted"
            if request.encoder and not tables.encoder_filled:
                self.runner.fill_encoder_blocks(tables, request.encoder)
                self.scheduler.blocks.register_encoder(tables, request.encoder)
            self.runner.set_slot(sequence)

    def _launch(self, plan: StepPlan) -> bool:
        """Launches a planned call; False if it gives no tokens to read."""
        if plan.empty:
            return False
        plan = self._with_programs(plan)
        for sequence in (*plan.decoding, *(chunk.sequence for chunk in plan.chunks)):
            assert sequence.block_tables is not None, "it is planned"
            self.guides.discard_logits(sequence)
            first = min(sequence.computed, len(sequence.tokens) - 1)
            self.scheduler.blocks.slide_window(sequence.block_tables, first)
        if self.speculator is not None and self.speculator.launch(plan, self.guides):
            return True
        return self._launch_mixed(plan) if _is_mixed(plan) else self._launch_decode(plan)

    def _with_programs(self, plan: StepPlan) -> StepPlan:
        """The plan without requests whose edits need a program that still compiles.

        Others go on meanwhile; if there are none, nothing is left out.
        """
        sequences = [*plan.decoding, *(chunk.sequence for chunk in plan.chunks)]
        taps = self.runner.taps_of(sequences)
        if taps is None or self.runner.programs.ready(self._step_key(plan, taps)):
            return plan
        decoding = tuple(s for s in plan.decoding if s.request.activations is None)
        chunks = tuple(c for c in plan.chunks if c.sequence.request.activations is None)
        others = replace(plan, decoding=decoding, chunks=chunks)
        return plan if others.empty else others

    def _step_key(self, plan: StepPlan, taps: StepTaps | None) -> StepKey:
        """The program of a planned call without drafts."""
        if not _is_mixed(plan):
            rows, samplers = self.runner.padded_rows(len(plan.decoding)), self.runner.samplers
            stages, extras = samplers.stages(plan.decoding), samplers.extras(plan.decoding)
            return StepKey("decode", rows, stages=stages, extras=extras, taps=taps)
        tokens = len(plan.decoding) + sum(chunk.count for chunk in plan.chunks)
        size = self.scheduler.batch_size(tokens)
        sampled = len(plan.decoding) + sum(chunk.samples for chunk in plan.chunks)
        key = StepKey("logits", size, self.runner.sampled_rows(size, sampled), taps=taps)
        if self.runner.images is None or not plan.has_images:
            return key
        return replace(key, images=self.runner.images.shapes)

    def _launch_mixed(self, plan: StepPlan) -> bool:
        """Launches chunks of prompts together with the next token of decoding sequences."""
        batch = [(s.slot, -1) for s in plan.decoding]
        sampled, last = [*plan.decoding], [*range(len(batch))]
        for chunk in plan.chunks:
            positions = range(chunk.start, chunk.start + chunk.count)
            batch += [(chunk.sequence.slot, position) for position in positions]
            if chunk.samples:
                sampled.append(chunk.sequence)
                last.append(len(batch) - 1)
        begun = time.perf_counter()
        blocks = self.scheduler.blocks
        tables = [(c, c.sequence.block_tables) for c in plan.chunks if c.sequence.block_tables]
        for chunk, of in tables:
            reserve_borders(blocks, of, chunk.start, chunk.start + chunk.count)
        size, running = self.scheduler.batch_size(len(batch)), self.scheduler.running
        images = self.runner.image_rows(size, plan)
        logits, rows = self.runner.compute_logits(size, batch, last, running, images)
        for chunk, of in tables:
            chunk.sequence.computed += chunk.count
            if chunk.sequence.request.images is not None:
                of.offset = chunk.sequence.request.images.shift_at(chunk.sequence.computed)
            self._register_blocks(chunk.sequence)
            keep_borders(blocks, of)
        self.runner.copy_blocks(copies_for_waiting(blocks, plan))
        if any(sequence.guided for sequence in sampled):
            self.guides.pending = logits, tuple(enumerate(sampled))
            return False
        if not sampled:
            return False
        output = self.runner.sample(logits, rows, sampled)
        self.record_in_flight(CallInFlight(output, tuple(enumerate(sampled)), 1, begun))
        return True

    def _launch_decode(self, plan: StepPlan) -> bool:
        """Launches a decoding call; not if its program still compiles and tokens can be read."""
        using = [s for s in plan.decoding if s.request.activations is not None]
        taps = self.runner.taps_of(using)
        key = self._step_key(plan, taps)
        if self._in_flight and not self.runner.programs.ready(key):
            return False
        self.runner.programs.get(key)  # it may be compiled first, which is not timed
        tables = self.runner.slot_tables(self.scheduler.running, taps, using)
        begun, sampled = time.perf_counter(), tuple(enumerate(plan.decoding))
        output = self.runner.decode(key, plan.decoding, tables, plan.steps, self._flag)
        self.record_in_flight(CallInFlight(output, sampled, plan.steps, begun, decodes=True))
        return True

    def sequence(self, request: int) -> RunningSequence | None:
        """The sequence of a request; None if it is not in the engine."""
        return self._sequences.get(request)

    def record_in_flight(self, call: CallInFlight) -> None:
        """Record a launched call, whose tokens `read_all` reads later."""
        for _, sequence in call.rows:
            sequence.in_flight += call.steps
        self._in_flight.append(call)

    def read_all(self, of: Sequence[RunningSequence] | None = None) -> Iterator[Token | Failed]:
        """Read the tokens of all calls in flight.

        Args:
            of: reads only up to the last call that gives tokens of these sequences.
        """
        while any_involves(self._in_flight, of):
            yield from self._read_call(self._in_flight.popleft())

    def _read_call(self, call: CallInFlight) -> Iterator[Token | Failed]:
        tokens = np.asarray(call.output.tokens)
        self._record_duration(call, tokens)
        for row, sequence in call.rows:
            sequence.in_flight -= call.steps
            if sequence.block_tables is None:
                continue  # its request has ended meanwhile
            count = int(np.count_nonzero(tokens[:, row] >= 0))
            if count:
                self.runner.samplers.note(sequence.request.id, call, count - 1, row)
            origins: list[str] = []
            if self.speculator is not None:
                ids = tokens[:count, row].tolist()
                origins = self.speculator.observe(call, sequence, ids)
            origins += [""] * (count - len(origins))
            new = self._append_tokens(sequence, call.output, row, origins)
            if (tokens[:, row] == NOT_FINITE).any():
                yield from new
                sequence.ended = True
                yield Failed(sequence.request.id, NotFiniteError())
            elif not sequence.guided:
                yield from new
            else:
                self.guides.advance(sequence, list(new), self.runner.programs.words)

    def _append_tokens(
        self, sequence: RunningSequence, output: SamplerOutput, row: int, origins: Sequence[str]
    ) -> Iterator[Token]:
        """Appends new tokens to a sequence, one for each origin, and yields them."""
        for step, origin in enumerate(origins):
            token = make_token(output, step, row, sequence.request)
            sequence.append(token.id)
            yield replace(token, origin=origin) if origin else token
        if not sequence.in_flight:
            before = sequence.computed // BLOCK
            sequence.computed = len(sequence.tokens) - 1
            if sequence.computed // BLOCK > before:
                self._register_blocks(sequence)

    def _register_blocks(self, sequence: RunningSequence) -> None:
        """Enters a sequence's blocks into the prefix cache, as far as its tokens are known."""
        if sequence.block_tables is not None and sequence.request.reuse:
            # Tokens in flight are computed, but not known.
            computed = min(sequence.computed, len(sequence.tokens))
            self.scheduler.blocks.register(sequence.block_tables, sequence.cache_ids, computed)

    def _record_duration(self, call: CallInFlight, tokens: np.ndarray) -> None:
        now = time.perf_counter()
        steps = int(np.count_nonzero((tokens >= 0).any(axis=1)))
        self.call_seconds = max(1e-6, now - max(call.launched_at, self._last_read))
        if call.decodes and steps:
            self.step_seconds = self.call_seconds / steps
        self._last_read = now


def _is_mixed(plan: StepPlan) -> bool:
    """Whether a call has chunks of prompts, or sequences for which grammars have masks."""
    return bool(plan.chunks) or any(sequence.guided for sequence in plan.decoding)


def end_thought(runner: ModelRunner, sequence: RunningSequence) -> list[Token]:
    """Force the end of a thought that is at its budget, and limit how far the device may go.

    The tokens of the end are appended like prompt tokens and computed together. If the request has
    log-probabilities, they are sampled one by one, each as the only allowed token. Those of a
    guided sequence are appended with its mask (`jinfer.engine.search.grammar_worker`), because its
    grammar has to take them, too.

    Returns:
        The forced tokens.
    """
    thought = sequence.thought
    if thought is None or sequence.in_flight or sequence.waits_for_grammar or sequence.ended:
        return []
    forced: list[int] = []
    samples = sequence.request.sampling.logprobs is not None
    while thought.due and not samples and not sequence.guided and sequence.room:
        forced.append(thought.due[0])
        sequence.append(forced[-1])
    must = thought.due[0] if thought.due and not sequence.guided else None
    allowed = max(1, thought.allowed) if thought.allowed is not None else sequence.room
    limit = len(sequence.tokens) + min(allowed, sequence.room)
    changed = bool(forced) or (must, limit) != (sequence.must, sequence.limit)
    sequence.must, sequence.limit = must, limit
    if changed and sequence.block_tables is not None:
        runner.set_slot(sequence)
    return [Token(sequence.request.id, id) for id in forced]

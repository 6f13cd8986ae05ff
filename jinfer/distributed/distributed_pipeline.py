"""Distributed pipeline: the steps of a model whose stages are on several hosts.

The programs of single stages are the same as in one process (`jinfer.parallel.stage_compiler`).
Rank 0, the coordinator, broadcasts each call, and each rank launches its own stages' programs.
Results are delivered through the worker state.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jinfer.distributed.futures import ResultFuture, remote_arrays
from jinfer.distributed.process_group import ProcessGroup
from jinfer.distributed.wire_format import ResultRef
from jinfer.distributed.worker_state import DONE, OUT, PLACES, WorkerState
from jinfer.engine.requests import EngineError
from jinfer.engine.runner.compiled_programs import Program
from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.runner.sampler_output import SamplerOutput
from jinfer.engine.runner.step_forms import CacheStep, EncoderStep, ForwardStep, StateStep, Step
from jinfer.engine.runner.step_key import StepKey
from jinfer.ops.attention.kv_cache import ENCODER
from jinfer.parallel.device_groups import first_replica
from jinfer.parallel.microbatches import MicroBatchRows
from jinfer.parallel.pipeline import Pipeline

LOGITS, ROWS, PAST, ENCODED = "logits", "rows", "past", "encoded"  # names of calls' results
_ON_EACH_RANK = object()  # in place of a cache or a state, of which each rank has its own


class RemoteReference:
    """A reference to a result that stays on the rank that computed it, for a later call."""

    def __init__(self, ref: ResultRef, shape: tuple[int, ...] = (), lane: int = 0) -> None:
        self.ref, self.shape, self.lane = ref, shape, lane


class RankProgram(NamedTuple):
    """A rank's share of a step.

    Attributes:
        run: takes the call's number and its arguments without parameters, cache and state.
        own: how many of a call's first arguments are parameters, cache and state.
        like: the structure of what the call returns to rank 0; None: nothing.
    """

    run: Callable[..., None]
    own: int
    like: Any = None


@dataclass(kw_only=True)
class DistributedPipeline(Pipeline):
    """The stages of all ranks, as one rank has them.

    Attributes:
        group: the job's processes.
        worker: this rank's stages, caches and states.
    """

    group: ProcessGroup
    worker: WorkerState = field(init=False)
    _dropped: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.worker = WorkerState(group=self.group, compiler=self.compiler, lanes=self.lanes)

    def release(self) -> None:
        """As `Pipeline.release`; rank 0 has all ranks do so."""
        if self.group.rank == 0:
            self.group.send_to_all(release=True)
        super().release()
        self.worker.threads.close()
        self.worker.caches.clear()
        self.worker.states.clear()

    def allocate_kv_cache(self) -> Any:
        """Has all ranks empty their caches."""
        return self._reset("cache")

    def empty_state(self) -> Any:
        """Has all ranks reset their states."""
        return self._reset("state")

    def _reset(self, what: str) -> Any:
        self.group.send_to_all(reset=what)
        self.worker.reset(what)
        return _ON_EACH_RANK

    def program(self, step: Step, key: StepKey) -> Program:
        """This rank's share of a step; on rank 0 the step as an engine calls it."""
        if self.group.rank == 0:
            # The workers compile theirs at the same time.
            self.group.send_to_all(announce=asdict(key))
        made = self._rank_program(step, key)
        if self.group.rank:
            return made.run

        def program(*arguments: Any) -> Any:
            if made.own > 1:
                self.worker.leaves = arguments[0]
            return self._call(key, made, arguments[made.own :])

        return program

    def _rank_program(self, step: Step, key: StepKey) -> RankProgram:
        match step:
            case StateStep():
                return self._state_program(step, key)
            case CacheStep() if not step.reads and step.rows is None:
                return self._cache_program(step, key)
            case ForwardStep() if not step.drafted:
                make = self._stateless_program if step.begin is None else self._stateful_program
                return make(step, key)
            case EncoderStep():
                return self._fill_program(step) if step.want is None else self._encode_program(step)
        raise EngineError(f"there is no {key.kind} with several processes; leave out [partition]")

    def _call(self, key: StepKey, made: RankProgram, given: tuple[Any, ...]) -> Any:
        """Has all ranks compute a call; returns what the engine expects of it."""
        call = next(self.group.calls)
        if key.kind == "set_slot":
            given = ([np.asarray(leaf) for leaf in jax.tree.leaves(given[0])], *given[1:])
        arguments = [_serializable(argument) for argument in given]
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self.group.send_to_all(shape=asdict(key), call=call, given=arguments, drop=dropped)
        self.worker.drop(dropped)
        coming = None if made.like is None else self.worker.results.expect(call, DONE)
        made.run(call, *arguments)
        kept = _ON_EACH_RANK
        if key.kind == "logits":
            lane, _ = self.lanes.of_slots(given[0])
            shape = key.chosen, self.model.vocab
            logits = self._keeping(RemoteReference(ResultRef(call, LOGITS), shape))
            return kept, logits, RemoteReference(ResultRef(call, ROWS), lane=lane)
        if coming is None:
            return kept
        outputs = remote_arrays(coming, made.like, self.group.fail)
        match key.kind:
            case "encode":
                return outputs
            case "sample":
                return kept, outputs
            case "decode":
                return kept, kept, outputs
            case "contrastive":
                past = self._keeping(RemoteReference(ResultRef(call, PAST)))
                return kept, past, *outputs
        return kept, *outputs

    @property
    def _sampled(self) -> Any:
        """A tree with the structure of the sampler's output."""
        progress = jax.tree.map(lambda _: 0, self.compiler.state.progress)
        return SamplerOutput(*(0,) * 4, progress)  # type: ignore[arg-type]

    def _keeping(self, kept: RemoteReference) -> RemoteReference:
        """Has a call's results dropped on their rank once the reference is garbage-collected."""
        weakref.finalize(kept, self._dropped.append, kept.ref.call).atexit = False
        return kept

    def _state_program(self, step: StateStep, key: StepKey) -> RankProgram:
        worker, program = self.worker, self.state_program(step, key)
        if key.kind == "set_slot":
            tree = jax.tree.structure(self.compiler.state)

            def set_slot(call: int, leaves: Any, slot: Any) -> None:
                row = jax.tree.unflatten(tree, leaves)
                lane, own = self.in_lane(step.slots, (row, slot))

                def work() -> None:
                    worker.states[lane] = program(worker.states[lane], *own)

                worker.queue_at_home(lane, work)

            return RankProgram(set_slot, 1)

        def run(call: int, logits: ResultRef, given: Any, *mask: Any) -> None:
            # Rows that only home knows come as a reference, with the micro-batch's number.
            rows = (
                MicroBatchRows(given["lane"], given["rows"]) if isinstance(given, dict) else given
            )
            lane, (_, own, *_) = self.in_lane(step.slots, (logits, rows))
            get_logits, get_rows = worker.resolve(logits), worker.resolve(own)

            def work() -> None:
                arguments = get_logits(), get_rows(), *mask
                chosen = worker.update_state(lane, lambda state: program(state, *arguments))
                self._done(call, lane, chosen)

            worker.queue_at_home(lane, work)

        return RankProgram(run, 1, self._sampled)

    def _cache_program(self, step: CacheStep, key: StepKey) -> RankProgram:
        worker = self.worker
        made = {n: self.compiler.of_cache(n, key, step).program for n in worker.local_stages}

        def run(call: int, *arguments: Any) -> None:
            def change(number: int) -> None:
                worker.caches[number] = made[number](worker.caches[number], *arguments)

            for number in made:
                worker.threads.add(f"stage {number}", partial(change, number))

        return RankProgram(run, 1)

    def _stateful_program(self, step: ForwardStep, key: StepKey) -> RankProgram:
        """Home computes the flat batch for all ranks, and what the step ends with."""
        worker, parts = self.worker, self.forward_parts(step, key)

        def run(call: int, *arguments: Any) -> None:
            tables, rest = step.without_tables(arguments)
            lane, own = self.in_lane(0, tuple(rest))
            carried: ResultFuture = Future()

            def begin() -> None:
                batch, last, value = parts.begin(worker.states[lane], {}, *own)
                carried.set_result(value)
                ranks = set(range(self.group.size))
                worker.deliver(call, PLACES, (batch, last), ranks, f"lane {lane}")

            if key.kind == "logits":
                worker.store(call, ROWS, carried)
                logits = worker.store(call, LOGITS, Future())
            worker.queue_at_home(lane, begin)
            worker.run_decoder(call, parts.made, None, self.lanes.tables(lane, tables))

            def finish(out: Any) -> None:
                if parts.finish is None:
                    logits.set_result(out["logits"])
                    return
                given = out, carried.result(), *own
                output = worker.update_state(lane, lambda state: parts.finish(state, *given))
                self._done(call, lane, output)

            self._at_home(call, lane, finish)

        return RankProgram(run, 3, self._sampled if step.samples else None)

    def _stateless_program(self, step: ForwardStep, key: StepKey) -> RankProgram:
        """Results of the last stage stay at home, or go to rank 0."""
        worker, parts, stays = self.worker, self.forward_parts(step, key), key.kind == "contrastive"

        def run(call: int, batch: Any, *rest: Any) -> None:
            batch = FlatBatch(*batch)
            worker.run_decoder(call, parts.made, batch, batch.tables)
            arguments = [worker.resolve(argument) for argument in rest]
            # The hidden states so far are large, and only the next call needs them: they stay.
            past = worker.store(call, PAST, Future()) if stays else None

            def finish(out: Any) -> None:
                given = out, None, batch, *(resolve() for resolve in arguments)
                outputs = parts.finish(*given)
                if past is not None:
                    past.set_result(outputs[0])
                    outputs = outputs[1:]
                self._done(call, 0, outputs)

            self._at_home(call, 0, finish)

        return RankProgram(run, 2, parts.outputs[1:] if stays else parts.outputs)

    def _at_home(self, call: int, lane: int, finish: Callable[[Any], None]) -> None:
        """Queues `finish` at home, with the last stage's results."""
        worker = self.worker
        if worker.samples_here:
            coming = worker.results.expect(call, OUT)
            worker.queue_at_home(lane, lambda: finish(coming.result()))

    def _done(self, call: int, lane: int, value: Any) -> None:
        """Sends a call's result to rank 0."""
        self.worker.deliver(call, DONE, value, {0}, f"lane {lane}")

    def _fill_program(self, step: EncoderStep) -> RankProgram:
        worker = self.worker
        made = self.compiler.encoder(step.arguments[0], "hidden")
        assert made[-1] is not None, "the last stage returns the encoder's output"
        encoded = made[-1].out["hidden"]
        filled = {
            number: stage
            for number, stage in enumerate(self.stages)
            if any(cache.group == ENCODER for cache in stage.model.model.caches.values())
        }
        programs = {n: self.compiler.fill(n, encoded).program for n in filled}
        receivers = {rank for number in filled for rank in worker.owners(number)}

        def run(call: int, tokens: Any, lengths: Any, table: Any) -> None:
            worker.run_encoder(call, made, tokens, np.zeros_like(tokens), lengths)
            self._at_home(
                call,
                0,
                lambda out: worker.deliver(call, ENCODED, out["hidden"], receivers, "lane 0"),
            )
            local = [number for number in filled if number in worker.local_stages]
            coming = worker.results.expect(call, ENCODED) if local else None

            def fill(number: int) -> None:
                assert coming is not None, "this rank has such a stage"
                stage, cache = filled[number], worker.caches[number]
                text = stage.device_group.replicate(coming.result()), lengths, table
                worker.caches[number] = programs[number](worker.leaves[stage.leaves], cache, *text)

            for number in local:
                worker.threads.add(f"stage {number}", partial(fill, number))

        return RankProgram(run, 2)

    def _encode_program(self, step: EncoderStep) -> RankProgram:
        worker, want = self.worker, step.want
        assert want is not None, "it has a result"
        made = self.compiler.encoder(step.arguments[0], want)

        def run(call: int, tokens: Any, types: Any, lengths: Any) -> None:
            worker.run_encoder(call, made, tokens, types, lengths)
            self._at_home(call, 0, lambda out: self._done(call, 0, _float32(out[want])))

        return RankProgram(run, 2, 0)


def _float32(array: Array) -> np.ndarray:
    return np.asarray(first_replica(array)).astype(np.float32)


def _serializable(given: Any) -> Any:
    """An argument as it is sent: NumPy arrays, and references to results on other ranks."""
    if isinstance(given, RemoteReference):
        if given.ref.name == ROWS:
            return {"lane": given.lane, "rows": given.ref}
        return given.ref
    if isinstance(given, dict | FlatBatch):
        return jax.tree.map(np.asarray, given)
    if isinstance(given, list):
        return given
    return np.asarray(given)

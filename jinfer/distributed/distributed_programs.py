"""Distributed programs: a rank's share of each call of a model on several hosts.

The programs of single stages are the same as in one process (`jinfer.parallel.stage_programs`).
The coordinator broadcasts each call, and each rank launches its own stages' programs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax import Array

from jinfer.distributed.futures import ResultFuture
from jinfer.distributed.process_group import ProcessGroup
from jinfer.distributed.wire_format import ResultRef
from jinfer.distributed.worker_state import DONE, OUT, PLACES, WorkerState
from jinfer.engine.runner.compiled_programs import Program
from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.runner.step_key import StepKey
from jinfer.nn.abstract_model import Want
from jinfer.ops.attention.kv_cache import ENCODER
from jinfer.parallel.device_groups import first_replica
from jinfer.parallel.pipeline_programs import PipelinePrograms

LOGITS, ROWS, PAST, ENCODED = "logits", "rows", "past", "encoded"  # names of calls' results


@dataclass(kw_only=True)
class DistributedPrograms(PipelinePrograms):
    """A rank's programs. Each takes the call's number and arguments, and returns nothing.

    Results are delivered through the worker state.

    Attributes:
        group: the job's processes.
        worker: this rank's stages, caches and states.
    """

    group: ProcessGroup
    worker: WorkerState = field(init=False)

    def __post_init__(self) -> None:
        self.worker = WorkerState(group=self.group, compiler=self.compiler, lanes=self.lanes)

    @cached_property
    def state(self) -> Any:
        """A micro-batch's abstract state: the states themselves may be on another rank."""
        return self.compiler.state

    def release(self) -> None:
        super().release()
        self.worker.threads.close()
        self.worker.caches.clear()
        self.worker.states.clear()

    def _logits(self, shape: StepKey) -> Program:
        flow = self._of_state(shape.tokens, shape.chosen)

        def run(call: int, *arguments: Any) -> None:
            logits, rows = self.worker.store(call, LOGITS), self.worker.store(call, ROWS)
            lane = flow(call, *arguments, rows)
            self._at_home(call, lane, lambda out: logits.set_result(out["logits"]))

        return run

    def _of_state(self, tokens: int, chosen: int) -> Program:
        """The forward pass of all stages for sequences in a state; it returns their micro-batch.

        Home computes the flat batch for all ranks, and the rows to sample for.
        """
        worker, rows_of = self.worker, self.lanes.rows
        begin = self.compiler.begin(tokens, chosen).program
        flow = self.compiler.decoder(tokens, (rows_of, rows_of + 1), chosen, ("logits",))

        def run(
            call: int, slots: Any, positions: Any, tables: Any, last: Any, sampled: ResultFuture
        ) -> int:
            lane, rows = self.lanes.of_slots(slots)

            def work() -> None:
                batch, sampled_rows = begin(worker.states[lane], rows, positions, {}, last)
                sampled.set_result(sampled_rows)
                ranks = set(range(self.group.size))
                worker.deliver(call, PLACES, batch, ranks, f"lane {lane}")

            worker.queue_at_home(lane, work)
            worker.run_decoder(call, flow, None, self.lanes.tables(lane, tables), last)
            return lane

        return run

    def _at_home(self, call: int, lane: int, finish: Callable[[Any], None]) -> None:
        """Queues `finish` at home, with the last stage's results."""
        worker = self.worker
        if worker.samples_here:
            coming = worker.results.expect(call, OUT)
            worker.queue_at_home(lane, lambda: finish(coming.result()))

    def _done(self, call: int, lane: int, value: Any) -> None:
        """Sends a call's result to rank 0."""
        self.worker.deliver(call, DONE, value, {0}, f"lane {lane}")

    def _sample(self, shape: StepKey) -> Program:
        worker = self.worker
        program = self.compiler.choose(shape.chosen, self.width, shape.stages).program

        def run(call: int, logits: ResultRef, given: Any, mask: Any, masked: Any) -> None:
            # Rows that only home knows come as a reference, with the micro-batch's number.
            by_reference = isinstance(given, dict)
            lane, rows = (
                (given["lane"], given["rows"]) if by_reference else self.lanes.of_slots(given)
            )
            get_logits, get_rows = worker.resolve(logits), worker.resolve(rows)

            def work() -> None:
                arguments = get_logits(), get_rows(), mask, masked
                chosen = worker.update_state(lane, lambda state: program(state, *arguments))
                self._done(call, lane, chosen)

            worker.queue_at_home(lane, work)

        return run

    def _decode(self, shape: StepKey) -> Program:
        worker, count = self.worker, shape.tokens
        flow = self._of_state(count, count)
        choose = self.compiler.choose(count, self.width, shape.stages).program
        newest, every = np.full(count, -1, np.int32), np.arange(count, dtype=np.int32)
        unmasked = np.zeros((count, self.words), np.uint32), np.bool_(False)

        def run(call: int, slots: Any, tables: Any, *_: Any) -> None:
            # The other arguments are for several steps in one call, and for interrupts.
            sampled_rows: ResultFuture = Future()
            lane = flow(call, slots, newest, tables, every, sampled_rows)

            def finish(out: Any) -> None:
                arguments = out["logits"], sampled_rows.result(), *unmasked
                chosen = worker.update_state(lane, lambda state: choose(state, *arguments))
                self._done(call, lane, chosen)

            self._at_home(call, lane, finish)

        return run

    def _whole(
        self,
        shape: StepKey,
        wants: tuple[Want, ...],
        finish: Callable[..., Any],
        *more: Any,
        several: bool = False,
    ) -> Program:
        """As `PipelinePrograms._whole`; results of the last stage stay at home, or go to rank 0."""
        worker = self.worker
        flow = self.compiler.decoder(shape.tokens, (shape.rows, shape.rows), None, wants)
        end = self.compiler.finish(shape, finish, flow[-1].out[1], *more).program
        stays = shape.kind == "contrastive"

        def run(call: int, batch: Any, *rest: Any) -> None:
            batch = FlatBatch(*batch)
            worker.run_decoder(call, flow, batch, batch.tables, None)
            arguments = [worker.resolve(argument) for argument in rest]
            # The hidden states so far are large, and only the next call needs them: they stay.
            past = worker.store(call, PAST) if stays else None

            def work(out: Any) -> None:
                finished = end(out, *(resolve() for resolve in arguments))
                if past is not None:
                    past.set_result(finished[0])
                    finished = finished[1:]
                self._done(call, 0, finished)

            self._at_home(call, 0, work)

        return run

    def _fill_cross_attention(self, shape: StepKey) -> Program:
        worker = self.worker
        made = self.compiler.encoder(1, shape.tokens, ("hidden",))
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

        return run

    def _encode(self, shape: StepKey) -> Program:
        worker = self.worker
        made = self.compiler.encoder(shape.rows, shape.tokens, (shape.want,))

        def run(call: int, tokens: Any, types: Any, lengths: Any) -> None:
            worker.run_encoder(call, made, tokens, types, lengths)
            self._at_home(call, 0, lambda out: self._done(call, 0, _float32(out[shape.want])))

        return run

    def _copy_blocks(self, shape: StepKey) -> Program:
        worker = self.worker
        copies = {number: self.compiler.copy(number).program for number in worker.local_stages}

        def run(call: int, *ids: Any) -> None:
            def copy(number: int) -> None:
                worker.caches[number] = copies[number](worker.caches[number], *ids)

            for number in copies:
                worker.threads.add(f"stage {number}", partial(copy, number))

        return run

    def _set_slot(self, shape: StepKey) -> Program:
        worker, program = self.worker, self.compiler.admit().program
        tree = jax.tree.structure(self.compiler.state)

        def run(call: int, leaves: Any, slot: Any) -> None:
            lane, rows = self.lanes.of_slots(np.array([slot]))
            row = jax.tree.unflatten(tree, leaves)

            def work() -> None:
                worker.states[lane] = program(worker.states[lane], row, rows[0])

            worker.queue_at_home(lane, work)

        return run


def _float32(array: Array) -> np.ndarray:
    return np.asarray(first_replica(array)).astype(np.float32)

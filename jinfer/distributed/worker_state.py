"""Worker state: a rank's pipeline stages, caches and states, and transfers between ranks.

All ranks compute a call together. Each knows from the plan which stages of it are its own, and
where their inputs come from: a local stage, or another rank, which sends them when they are
computed. Stages are launched when their inputs are there, not in the order of calls, so ranks
work on different micro-batches at the same time.

Hidden states go from rank to rank through host memory and sockets: a device that waited for a
receive in its queue would block all that is queued behind it. Only the all-reduces of a stage
whose devices belong to several ranks are collectives of the devices themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from jinfer.distributed.futures import PendingResults, ResultFuture
from jinfer.distributed.named_threads import NamedThreads
from jinfer.distributed.process_group import ProcessGroup
from jinfer.distributed.wire_format import ResultRef
from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.nn.transformer_layer import HiddenState
from jinfer.parallel.device_groups import first_replica
from jinfer.parallel.microbatches import MicroBatches
from jinfer.parallel.pipeline_stage import PipelineStage
from jinfer.parallel.stage_compiler import CompiledStage, StageCompiler

# Names of a call's results.
HIDDEN = "x {}"  # hidden states for the stage of this number
OUT = "out"  # the last stage's results, for home
PLACES = "places"  # the flat batch without block tables, for all ranks
DONE = "done"  # the call's result, for rank 0


@dataclass(eq=False, kw_only=True)
class WorkerState:
    """A rank's state of a model, and its share of each call.

    "Home" is the rank that has the sampling states and samples tokens: the last stage's first.

    Attributes:
        group: the job's processes.
        compiler: compiles the stages' programs.
        lanes: how slots are divided among micro-batches.
        leaves: the parameters of all stages; abstract for stages of other ranks.
        caches: the KV cache of each local stage, by the stage's number.
        states: the state of each micro-batch, at home.
    """

    group: ProcessGroup
    compiler: StageCompiler
    lanes: MicroBatches
    leaves: Sequence[Any] = ()
    caches: dict[int, Any] = field(default_factory=dict)
    states: dict[int, Any] = field(default_factory=dict)
    _stored: dict[int, dict[str, ResultFuture]] = field(default_factory=dict)

    @property
    def results(self) -> PendingResults:
        """Results of calls that this rank waits for."""
        return self.group.results

    @cached_property
    def threads(self) -> NamedThreads:
        """The threads that launch programs and send results."""
        # Stages that this rank shares with others: their collectives need one common order.
        shared = [
            s
            for s in self.stages
            if s.device_group.local and len(s.device_group.local) < len(s.device_group.devices)
        ]
        return NamedThreads(self.group.fail, together=len(shared) > 1)

    @property
    def stages(self) -> tuple[PipelineStage, ...]:
        """All stages, of all ranks."""
        return self.compiler.stages

    @cached_property
    def local_stages(self) -> dict[int, PipelineStage]:
        """The stages with devices of this rank, by their numbers."""
        return {
            number: stage for number, stage in enumerate(self.stages) if stage.device_group.local
        }

    @cached_property
    def home(self) -> int:
        """The rank that has the states and samples tokens."""
        return self.compiler.home.devices[0].process_index

    @property
    def samples_here(self) -> bool:
        """Whether this rank is home."""
        return self.home == self.group.rank

    def owners(self, number: int) -> set[int]:
        """The ranks that have devices of a stage."""
        return {device.process_index for device in self.stages[number].device_group.devices}

    def queue_at_home(self, lane: int, work: Callable[[], None]) -> None:
        """Queues work for a micro-batch at home; does nothing on other ranks."""
        if self.samples_here:
            self.threads.add(f"lane {lane}", work)

    def deliver(self, call: int, name: str, value: Any, to: set[int], sender: str) -> None:
        """Delivers a result to the ranks that expect it; sends from a thread of its own.

        Args:
            sender: the name of the thread that computed it.
        """
        if self.group.rank in to:
            self.results.put(call, name, value)
        if others := to - {self.group.rank}:
            self.threads.add(f"{sender}, sending", partial(self._send, call, name, value, others))

    def _send(self, call: int, name: str, value: Any, others: set[int]) -> None:
        """Sends a result to other ranks, as soon as it is computed."""
        on_host = jax.tree.map(np.asarray, value)
        for other in others:
            self.group.send(other, result=name, call=call, value=on_host)

    def store(self, call: int, name: str, future: ResultFuture) -> ResultFuture:
        """Keeps a result at home for later calls, which name it by a `ResultRef`, until dropped."""
        if self.samples_here:
            self._stored.setdefault(call, {})[name] = future
        return future

    def resolve(self, given: Any) -> Callable[[], Any]:
        """A function that returns an argument; at home it resolves a `ResultRef`, and waits."""
        if not isinstance(given, ResultRef) or not self.samples_here:
            return lambda: given
        return self._stored[given.call][given.name].result

    def drop(self, calls: Sequence[int]) -> None:
        """Drops the stored results of calls."""
        for call in calls:
            self._stored.pop(call, None)

    def reset(self, what: str) -> None:
        """Empties the caches, or resets the states."""
        if what == "cache":
            for number, stage in self.local_stages.items():
                self.threads.add(f"stage {number}", partial(self._empty, number, stage))
            return
        for lane in range(self.lanes.count):
            self.queue_at_home(lane, partial(self._fresh, lane))

    def _empty(self, number: int, stage: PipelineStage) -> None:
        self.caches.pop(number, None)
        self.caches[number] = self.compiler.empty_cache(stage)

    def _fresh(self, lane: int) -> None:
        self.states[lane] = self.compiler.empty_state()

    def run_decoder(
        self,
        call: int,
        made: tuple[CompiledStage, ...],
        batch: FlatBatch | None,
        tables: Mapping[str, Any],
    ) -> None:
        """Queues the forward pass of all local stages over a flat batch; home gets `OUT`.

        Args:
            batch: None: home sends it as `PLACES`, without block tables, and with the tokens whose
                results are wanted.
        """
        coming = None if batch is not None else self.results.expect(call, PLACES)

        def run(number: int, x: Any) -> Any:
            stage = self.local_stages[number]
            places, last = coming.result() if coming is not None else (batch, None)
            assert places is not None, "passed, or sent"
            whole = FlatBatch(*places)._replace(tables=tables)
            hidden, local = jax.tree.map(stage.device_group.replicate, (x, whole))
            wanted = stage.device_group.replicate_tree(last) if stage.last else None
            weights, cache = self.leaves[stage.leaves], self.caches[number]
            program = made[number].program
            self.caches[number], out = program(weights, cache, hidden, local, wanted)
            return out

        self._stages(call, run)

    def run_encoder(self, call: int, made: tuple[CompiledStage | None, ...], *texts: Any) -> None:
        """Queues an encoder's forward pass of all local stages; home gets `OUT`."""

        def run(number: int, x: Any) -> Any:
            stage = self.local_stages[number]
            hidden, encoder = jax.tree.map(stage.device_group.replicate, x), made[number]
            if encoder is None:  # no layers of the encoder
                return hidden
            return encoder.program(self.leaves[stage.leaves], hidden, *texts)

        self._stages(call, run)

    def _stages(self, call: int, run: Callable[[int, Any], Any]) -> None:
        for number in self.local_stages:
            coming = self.results.expect(call, HIDDEN.format(number)) if number else None
            self.threads.add(f"stage {number}", partial(self._stage, call, number, coming, run))

    def _stage(
        self, call: int, number: int, coming: ResultFuture | None, run: Callable[[int, Any], Any]
    ) -> None:
        """Runs a stage, and delivers the result to the ranks of the next one."""
        # A message has lists for tuples.
        out = run(number, None if coming is None else HiddenState(*coming.result()))
        owners, sender = self.owners(number), f"stage {number}"
        if self.stages[number].last:
            if self.samples_here:
                self.deliver(call, OUT, jax.tree.map(first_replica, out), {self.home}, sender)
            return
        following = self.owners(number + 1)
        # A rank with devices of both stages passes it on locally; the lowest rank of this stage
        # sends it to all others.
        to = following & {self.group.rank}
        if self.group.rank == min(owners):
            to = to | (following - owners)
        value = out if to <= {self.group.rank} else jax.tree.map(first_replica, out)
        if to:
            self.deliver(call, HIDDEN.format(number + 1), value, to, sender)

    def update_state(self, lane: int, change: Callable[[Any], tuple[Any, Any]]) -> Any:
        """Replaces a micro-batch's state by `change`; returns its second result."""
        self.states[lane], out = change(self.states[lane])
        return out

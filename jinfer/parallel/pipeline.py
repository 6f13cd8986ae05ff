"""Pipeline parallelism: runs the steps of `step_table` on the stages of a model on several devices.

Parameters and cache are those of each stage, and there is a state for each micro-batch, on the last
stage's first device ("home"), where tokens are sampled. Calls are asynchronous: each stage waits
for its input from the previous one, the host for none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jinfer.engine.requests import EngineError
from jinfer.engine.runner.compiled_programs import Program
from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.runner.step_forms import (
    CacheStep,
    EncoderStep,
    ForwardStep,
    StateStep,
    Step,
    StepFunction,
    TapStep,
)
from jinfer.engine.runner.step_key import Sizes, StepKey
from jinfer.engine.runner.step_table import abstract_tables
from jinfer.engine.runner.verify import Nodes
from jinfer.modelspec.eagle_head import tap_names
from jinfer.nn.abstract_model import AbstractModel
from jinfer.nn.row_edits import IMAGES
from jinfer.ops.attention.kv_blocks import abstract_rows
from jinfer.ops.attention.kv_cache import ENCODER
from jinfer.parallel.device_groups import DeviceGroup, first_replica
from jinfer.parallel.host_kv_cache import HostCacheCompiler
from jinfer.parallel.launcher import Launcher
from jinfer.parallel.microbatches import MicroBatches, MicroBatchRows, MicroBatchStates
from jinfer.parallel.pipeline_stage import PipelineStage
from jinfer.parallel.stage_compiler import CompiledStage, StageCompiler, with_own_images
from jinfer.parallel.timeline import Timeline
from jinfer.parallel.weight_offload import WeightPrefetcher

type StageCaches = tuple[Any, ...]


class ForwardParts(NamedTuple):
    """The programs of a `ForwardStep` in a pipeline.

    Attributes:
        begin: makes the flat batch, at home.
        made: the stages' programs.
        finish: what follows at home; None: nothing has to be computed.
        outputs: the abstract results of `finish`.
        accepts: the programs of stages with recurrent states after a draft was verified.
    """

    begin: Program
    made: tuple[CompiledStage, ...]
    finish: Program
    outputs: Any = None
    accepts: tuple[CompiledStage | None, ...] = ()


@dataclass(kw_only=True)
class Pipeline:
    """The stages of a model, and their programs.

    Attributes:
        model: the whole model.
        sizes: the engine's sizes, which all programs share.
        stages: the pipeline's stages, in order.
        lanes: how slots are divided among micro-batches.
        timeline: records when stages are busy; None: nothing is recorded.
        hosted: how many cache blocks of each group are in host memory (KV cache offload).
        memory: the memory plan as a table, to be shown.
    """

    model: AbstractModel
    sizes: Sizes
    stages: tuple[PipelineStage, ...]
    lanes: MicroBatches
    timeline: Timeline | None = None
    hosted: Mapping[str, int] = field(default_factory=dict)
    memory: str = ""

    @cached_property
    def compiler(self) -> StageCompiler:
        """Compiles the stages' programs."""
        arguments = self.model, self.sizes, self.stages, self.lanes
        if not self.hosted:
            return StageCompiler(*arguments)
        return HostCacheCompiler(*arguments, hosted=self.hosted, launch=self.launch)

    @property
    def slots(self) -> int:
        """Sequences of a micro-batch, at most."""
        return self.lanes.rows

    @property
    def home_device(self) -> jax.Device:
        """The device that has the sampling states."""
        return self.compiler.home.devices[0]

    @cached_property
    def streams(self) -> dict[int, WeightPrefetcher]:
        """Weight offload: the prefetcher of each offloaded stage, by the stage's number."""
        prefetchers: dict[int, WeightPrefetcher] = {}
        for device_group in dict.fromkeys(
            stage.device_group for stage in self.stages if stage.streamed
        ):
            turns = tuple(
                n
                for n, stage in enumerate(self.stages)
                if stage.streamed and stage.device_group == device_group
            )
            prefetchers |= dict.fromkeys(turns, WeightPrefetcher(device_group, turns))
        return prefetchers

    def leaves_of(self, number: int, leaves: Any) -> Any:
        """A stage's parameters, on its devices."""
        stage_leaves = leaves[self.stages[number].leaves]
        if number not in self.streams:
            return stage_leaves
        return self.streams[number].take(
            number, {n: leaves[self.stages[n].leaves] for n in self.streams[number].turns}
        )

    @cached_property
    def launch(self) -> Launcher:
        """Launches the stages' programs, and those at home, where samples are drawn."""
        on_cpu = any(stage.device_group.platform == "cpu" for stage in self.stages)
        return Launcher(on_cpu and (len(self.stages) > 1 or bool(self.hosted)))

    def release(self) -> None:
        """Frees all programs, and ends the threads."""
        self.compiler.forget()
        self.launch.close()
        for stream in self.streams.values():
            stream.forget()

    def allocate_kv_cache(self) -> StageCaches:
        """The KV cache pools of each stage, filled with zeros."""
        return tuple(map(self.compiler.empty_cache, self.stages))

    def empty_state(self) -> MicroBatchStates:
        """A state for each micro-batch, without running sequences."""
        return tuple(self.compiler.empty_state() for _ in range(self.lanes.count))

    def move(self, tree: Any, source: DeviceGroup | None, target: DeviceGroup) -> Any:
        """Arrays of one group of devices, or of the host, replicated on another; asynchronous.

        Args:
            source: where the arrays are; None: on the host.
        """
        return target.replicate_tree(tree)

    def abstract_rows(self, count: int) -> tuple[Any, ...]:
        """The abstract results of "gather_blocks", for each stage with all its devices' shards."""
        compiler = self.compiler
        return tuple(
            stage.device_group.abstract_shards(
                abstract_rows(stage.model.model.caches, compiler.cache(stage), count)
            )
            for stage in self.stages
        )

    def hidden_taps(self, caches: StageCaches) -> Any:
        """The cached hidden states that "gather_taps" reads, by stage and layer."""
        of_stages = zip(self.stages, caches, strict=True)
        tapped = [(tap_names(stage.model.model.caches), cache) for stage, cache in of_stages]
        return tuple(tuple(cache[name] for name in names) for names, cache in tapped)

    def program(self, step: Step, key: StepKey) -> Program:
        """The program of a step: a chain of the stages' programs and those at home.

        Raises:
            EngineError: it runs on one device only.
        """
        match step:
            case StateStep():
                return self._state_step(step, key)
            case CacheStep():
                return self._cache_step(step, key)
            case ForwardStep():
                return self._forward_step(step, key)
            case EncoderStep():
                return self._encoder_step(step, key)
            case TapStep():
                return self._tap_step(step, key)
            case StepFunction():
                reason = f"there is no {key.kind} on several devices; leave out [partition]"
                raise EngineError(reason)

    def state_program(self, step: StateStep, key: StepKey) -> Program:
        """The program at home of a step of the device state."""
        compiler = self.compiler
        given = compiler.state, *compiler.on_home(step.arguments)
        return compiler.at_home(key, step.function, 0, *given).program

    def _state_step(self, step: StateStep, key: StepKey) -> Program:
        program = self.state_program(step, key)

        def run(states: MicroBatchStates, *arguments: Any) -> Any:
            lane, own = self.in_lane(step.slots, arguments)
            result = self.launch(f"lane {lane}", program, states[lane], *own)
            if not step.returns:
                return self.lanes.changed(states, lane, result)
            state, output = result
            return self.lanes.changed(states, lane, state), output

        return run

    def in_lane(self, index: int, arguments: tuple[Any, ...]) -> tuple[int, tuple[Any, ...]]:
        """The micro-batch of a call, and the arguments with its rows in place of slots.

        Args:
            index: of the argument that names slots, or rows of a micro-batch.
        """
        slots: Any = arguments[index]
        rows: Any
        if isinstance(slots, MicroBatchRows):
            lane, rows = slots.lane, slots.rows
        elif isinstance(slots, Nodes):
            lane, owners = self.lanes.of_slots(np.asarray(slots.owners))
            rows = slots._replace(owners=cast("Any", owners))
        else:
            lane, rows = self.lanes.of_slots(np.atleast_1d(slots))
            rows = rows if np.ndim(slots) else rows[0]
        return lane, (*arguments[:index], rows, *arguments[index + 1 :])

    def _cache_step(self, step: CacheStep, key: StepKey) -> Program:
        numbers = range(len(self.stages))
        made = [self.compiler.of_cache(number, key, step).program for number in numbers]

        def run(caches: StageCaches, *arguments: Any) -> Any:
            return tuple(
                self.launch(f"stage {n}", made[n], cache, *self._own(n, step.rows, arguments))
                for n, cache in enumerate(caches)
            )

        return run

    def _own(self, number: int, rows: int | None, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a stage: of `rows`, which the host has, its part on its devices."""
        if rows is None:
            return arguments
        group = self.stages[number].device_group
        put = partial(_on_devices, group)
        own = jax.tree.map(put, arguments[rows][number])
        return (*arguments[:rows], own, *arguments[rows + 1 :])

    def forward_parts(self, step: ForwardStep, key: StepKey) -> ForwardParts:
        """The programs of a forward pass."""
        compiler, state = self.compiler, self.compiler.state
        if step.begin is None:
            made = compiler.decoder(step.arguments[0], None, step.wants)
            results = compiler.on_home(made[-1].out[1])
            end = compiler.at_home(
                key, partial(step.finish, None), (), results, None, *step.arguments
            )
            return ForwardParts(_nothing, made, end.program, end.out)
        tables, rest = step.without_tables(step.arguments)
        begin = compiler.at_home(("begin", key), step.begin, (), state, {}, *rest)
        batch, last, carried = begin.out
        images = {name: table for name, table in tables.items() if name == IMAGES}
        rows = next(table.shape[0] for name, table in tables.items() if name != IMAGES)
        batch = batch._replace(tables=abstract_tables(self.sizes, rows) | images)
        made = compiler.decoder(batch, last, step.wants, drafted=step.drafted)
        if not step.samples:
            return ForwardParts(begin.program, made, None)
        results, carried = compiler.on_home(made[-1].out[1]), compiler.on_home(carried)
        finish = step.finish if step.loops is None else partial(_one_step, step.finish)
        end = compiler.at_home(("finish", key), finish, 0, state, results, carried, *rest)
        accepts: tuple[CompiledStage | None, ...] = ()
        if step.drafted:
            roots = rest[0].roots
            accepts = tuple(compiler.accept(n, out, batch, roots) for n, out in enumerate(made))
        return ForwardParts(begin.program, made, end.program, end.out, accepts)

    def _forward_step(self, step: ForwardStep, key: StepKey) -> Program:
        parts = self.forward_parts(step, key)
        flow, home = PipelineForward(self, parts.made), self.compiler.home

        def stateless(leaves: Any, caches: StageCaches, batch: Any, *rest: Any) -> Any:
            batch = FlatBatch(*batch)
            caches, out = flow(leaves, caches, batch, None, None, 0)
            return caches, *parts.finish(out, None, batch, *rest)

        def run(leaves: Any, caches: StageCaches, states: MicroBatchStates, *arguments: Any) -> Any:
            tables, rest = step.without_tables(arguments)
            lane, own = self.in_lane(0, tuple(rest))
            thread = f"lane {lane}"
            batch, last, carried = self.launch(thread, parts.begin, states[lane], {}, *own)
            # The tables of draft trees are by row of their nodes, the others by slot.
            here = tables if step.drafted else self.lanes.tables(lane, tables)
            caches, out = flow(leaves, caches, batch._replace(tables=here), last, home, lane)
            if parts.finish is None:
                logits, rows = step.finish(states[lane], out, carried, *own)
                return caches, logits, MicroBatchRows(lane, rows)
            state, output = self.launch(thread, parts.finish, states[lane], out, carried, *own)
            for number, accept in enumerate(parts.accepts):
                if accept is not None:
                    sampled = batch._replace(tables=here), own[0].roots, output.tokens
                    caches = self._accepted(number, accept, caches, sampled)
            return caches, self.lanes.changed(states, lane, state), output

        return stateless if step.begin is None else run

    def _accepted(
        self, number: int, accept: CompiledStage, caches: StageCaches, sampled: Any
    ) -> StageCaches:
        """The caches with a stage's states after the accepted nodes."""
        here = self.stages[number].device_group.replicate_tree(sampled)
        changed = self.launch(f"stage {number}", accept.program, caches[number], *here)
        return (*caches[:number], changed, *caches[number + 1 :])

    def _encoder_step(self, step: EncoderStep, key: StepKey) -> Program:
        if step.want is None:
            return self._fill(step)
        want, made = step.want, self.compiler.encoder(step.arguments[0], step.want)
        assert made[-1] is not None, "the last stage returns the encoder's output"
        out = self.compiler.on_home(made[-1].out[want])
        cast_to_float = self.compiler.at_home(key, _float32, (), out).program

        def run(leaves: Any, caches: Any, tokens: Any, types: Any, lengths: Any) -> Any:
            return cast_to_float(self._encode(made, leaves, tokens, types, lengths)[want])

        return run

    def _fill(self, step: EncoderStep) -> Program:
        """Puts an encoder's output into the caches of the stages with cross-attention."""
        made = self.compiler.encoder(step.arguments[0], "hidden")
        assert made[-1] is not None, "the last stage returns the encoder's output"
        encoded, home = made[-1].out["hidden"], self.compiler.home
        fills = {
            number: self.compiler.fill(number, encoded).program
            for number, stage in enumerate(self.stages)
            if any(cache.group == ENCODER for cache in stage.model.model.caches.values())
        }

        def run(leaves: Any, caches: StageCaches, tokens: Any, lengths: Any, table: Any) -> Any:
            encoded = self._encode(made, leaves, tokens, np.zeros_like(tokens), lengths)["hidden"]
            filled = list(caches)
            for number, fill in fills.items():
                stage = self.stages[number]
                text = self.move(encoded, home, stage.device_group), lengths, table
                arguments = self.leaves_of(number, leaves), caches[number], *text
                filled[number] = self.launch(f"stage {number}", fill, *arguments)
                if stage.streamed:
                    # The prefetcher cannot wait for the result, which the next step donates.
                    jax.block_until_ready(filled[number])
            return tuple(filled)

        return run

    def _encode(self, made: tuple[CompiledStage | None, ...], leaves: Any, *texts: Any) -> Any:
        """The results of an encoder's forward pass through all stages."""
        x, before = None, None
        for number, (stage, encoder) in enumerate(zip(self.stages, made, strict=True)):
            if encoder is None:
                continue
            x = self.move(x, before, stage.device_group)
            x, before = (
                encoder.program(self.leaves_of(number, leaves), x, *texts),
                stage.device_group,
            )
            if stage.streamed:
                self.streams[number].computed(x)
        return jax.tree.map(_first_replica, x)

    def _tap_step(self, step: TapStep, key: StepKey) -> Program:
        made = [self.compiler.tapped(number, key.tokens) for number in range(len(self.stages))]
        out = [self.compiler.on_home(program.out) for program in made if program is not None]
        concatenate = partial(jnp.concatenate, axis=-1)
        join = self.compiler.at_home(key, concatenate, (), out).program

        def run(layers: Any, *batch: Any) -> Any:
            hidden = []
            for number, (stage_program, tapped) in enumerate(zip(made, layers, strict=True)):
                if stage_program is not None:
                    states = self.launch(f"stage {number}", stage_program.program, tapped, *batch)
                    hidden.append(self.compiler.home.replicate(first_replica(states)))
            return join(hidden)

        return run


@dataclass(frozen=True)
class PipelineForward:
    """The forward pass of all stages over a flat batch."""

    pipeline: Pipeline
    made: tuple[CompiledStage, ...]

    def __call__(
        self,
        leaves: Any,
        caches: StageCaches,
        batch: FlatBatch,
        last: Any,
        source: DeviceGroup | None,
        lane: int,
    ) -> tuple[StageCaches, Any]:
        """The caches, and the results at home.

        Args:
            batch: its block tables are the host's.
            last: as of `stage_forward.decoder_forward`.
            source: where batch and `last` are; None: on the host.
        """
        new_caches, x = list[Any](), None
        pipeline, timeline = self.pipeline, self.pipeline.timeline
        batches: dict[DeviceGroup, tuple[FlatBatch, Any]] = {}
        tables, before = batch.tables, None
        batch = batch._replace(tables={})

        def batch_on(device_group: DeviceGroup) -> tuple[FlatBatch, Any]:
            if device_group not in batches:
                moved, last_there = pipeline.move((batch, last), source, device_group)
                there = pipeline.move(tables, None, device_group)
                batches[device_group] = moved._replace(tables=there), last_there
            return batches[device_group]

        for number, (stage, made) in enumerate(zip(pipeline.stages, self.made, strict=True)):
            here, last_here = batch_on(stage.device_group)
            here = with_own_images(here, stage)
            hidden = pipeline.move(x, before, stage.device_group)
            weights, before = pipeline.leaves_of(number, leaves), stage.device_group
            arguments = weights, caches[number], hidden, here, last_here if stage.last else None
            on_host: tuple[FlatBatch, ...] = ()
            if stage.host is not None:
                on_host = (with_own_images(batch_on(stage.host)[0], stage),)
            cache, x = pipeline.launch(f"stage {number}", made.program, *arguments, *on_host)
            # So that offloaded weights are freed as soon as the device has used them.
            del weights, arguments
            if stage.streamed:
                pipeline.streams[number].computed(x)
            new_caches.append(cache)
            if timeline is not None:
                timeline.note(number, lane, here.tokens if hidden is None else hidden, x)
        return tuple(new_caches), jax.tree.map(_first_replica, x)


def _first_replica(array: Any) -> Any:
    """As `first_replica`; an abstract array stays."""
    return first_replica(array) if isinstance(array, jax.Array) else array


def _float32(array: Any) -> Any:
    return array.astype(jnp.float32)


def _nothing(*_: Any) -> None:
    """The batch comes from the host."""


def _one_step(finish: Callable[..., Any], *arguments: Any) -> Any:
    """The results of a loop's step, the output with a leading axis of one step."""
    state, output = finish(*arguments)
    return state, jax.tree.map(lambda array: array[None], output)


def _on_devices(device_group: DeviceGroup, rows: Any) -> Any:
    """Rows of the host, each device's part on that device."""
    return device_group.join_shards(np.split(rows, len(device_group.devices)))

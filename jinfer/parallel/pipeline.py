"""Pipeline parallelism: runs the steps of `step_table` on the stages of a model on several devices.

Parameters and cache are those of each stage, and there is a state for each micro-batch, on the last
stage's first device ("home"), where tokens are sampled. Calls are asynchronous: each stage waits
for its input from the previous one, the host for none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jinfer.engine.requests import EngineError
from jinfer.engine.runner import device_state, head_steps
from jinfer.engine.runner.compiled_programs import Program
from jinfer.engine.runner.encoder_steps import fill_encoded
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
from jinfer.engine.runner.verify import Nodes, accept_states
from jinfer.modelspec.eagle_head import tap_names
from jinfer.nn.abstract_model import AbstractModel, Want
from jinfer.ops.attention.kv_blocks import abstract_rows
from jinfer.ops.attention.kv_cache import ENCODER, STATE, Cache, zero_cache
from jinfer.ops.recurrence.drafted_scan import join_inputs, split_inputs
from jinfer.parallel.device_groups import DeviceGroup, partition_specs
from jinfer.parallel.host_offload import HostKVCache, SplitPools, WeightPrefetcher
from jinfer.parallel.microbatches import MicroBatches, MicroBatchRows, MicroBatchStates
from jinfer.parallel.sharding_rules import TENSOR_AXIS
from jinfer.parallel.stage_model import (
    PipelineStage,
    StageModel,
    decoder_forward,
    encoder_forward,
    with_own_images,
)
from jinfer.parallel.stage_programs import Launcher, ProgramTable, StepCalls

type StageCaches = tuple[Any, ...]

_REPLICATED = PartitionSpec()
_FIRST_AXIS = PartitionSpec(TENSOR_AXIS)
_HEADS_AXIS = 1  # of cache pools: heads, or channels of recurrent states


@dataclass(kw_only=True)
class Pipeline:
    """The stages of a model, and their programs.

    Attributes:
        model: the whole model.
        sizes: the engine's sizes, which all programs share.
        stages: the pipeline's stages, in order.
        lanes: how slots are divided among micro-batches.
        observe: called with a launched stage's number, micro-batch, an input and a result.
        hosted: how many cache blocks of each group are in host memory (KV cache offload).
        memory: the memory plan as a table, to be shown.
    """

    model: AbstractModel
    sizes: Sizes
    stages: tuple[PipelineStage, ...]
    lanes: MicroBatches
    observe: Callable[[int, int, Any, Any], None] | None = None
    hosted: Mapping[str, int] = field(default_factory=dict)
    memory: str = ""
    _table: ProgramTable = field(default_factory=ProgramTable)

    @property
    def slots(self) -> int:
        """Sequences of a micro-batch, at most."""
        return self.lanes.rows

    @cached_property
    def home(self) -> DeviceGroup:
        """The device that has the sampling states, and samples tokens."""
        return DeviceGroup(self.stages[-1].device_group.devices[:1])

    @property
    def home_device(self) -> jax.Device:
        """As `home`."""
        return self.home.devices[0]

    @cached_property
    def launch(self) -> Launcher:
        """Launches the stages' programs, and those at home, where samples are drawn."""
        on_cpu = any(stage.device_group.platform == "cpu" for stage in self.stages)
        return Launcher(on_cpu and (len(self.stages) > 1 or bool(self.hosted)))

    @cached_property
    def streams(self) -> dict[int, WeightPrefetcher]:
        """Weight offload: the prefetcher of each offloaded stage, by the stage's number."""
        by_group: dict[DeviceGroup, dict[int, slice]] = {}
        for number, stage in enumerate(self.stages):
            if stage.streamed:
                by_group.setdefault(stage.device_group, {})[number] = stage.leaves
        return {
            number: prefetcher
            for turns in by_group.values()
            for prefetcher in [WeightPrefetcher(turns)]
            for number in turns
        }

    @cached_property
    def host_cache(self) -> HostKVCache:
        """KV cache offload: the programs of layers with blocks on the host."""
        return HostKVCache(self.sizes.blocks, self.hosted)

    def release(self) -> None:
        """Frees all programs, and ends the threads."""
        self._table.clear()
        self.launch.close()
        for stream in self.streams.values():
            stream.forget()

    @cached_property
    def abstract_caches(self) -> StageCaches:
        """The abstract KV cache pools of each stage."""
        return tuple(map(self._abstract_cache, self.stages))

    def _abstract_cache(self, stage: PipelineStage) -> Any:
        if stage.host is None:
            return self._pools(stage, self.sizes.blocks, stage.device_group)
        on_device = self._pools(stage, self.host_cache.first, stage.device_group)
        return SplitPools(on_device, self._pools(stage, self.hosted, stage.host))

    def _pools(self, stage: PipelineStage, blocks: Mapping[str, int], group: DeviceGroup) -> Cache:
        """A stage's abstract pools with a number of blocks for each cache group; 0: no pool."""
        shapes = {n: s for n, s in stage.model.model.caches.items() if blocks.get(s.group)}
        counts = {name: blocks[shape.group] for name, shape in shapes.items()}
        pools = jax.eval_shape(lambda: zero_cache(shapes, counts, self.sizes.kv_cache))
        return cast("Cache", group.abstract(pools, _HEADS_AXIS))

    @cached_property
    def cache_specs(self) -> tuple[Any, ...]:
        """The partition specs of each stage's pools."""
        return tuple(map(partition_specs, self.abstract_caches))

    def allocate_kv_cache(self) -> StageCaches:
        """The KV cache pools of each stage, filled with zeros."""

        def zeros(pools: Cache) -> Cache:
            shardings = jax.tree.map(lambda array: array.sharding, pools)
            made = partial(jax.tree.map, lambda array: jnp.zeros(array.shape, array.dtype), pools)
            return cast("Cache", jax.jit(made, out_shardings=shardings)())

        def of_stage(stage: PipelineStage, abstract: Any) -> Any:
            if isinstance(abstract, SplitPools):
                return SplitPools(zeros(abstract.device), zeros(abstract.host))
            # Another process allocates the pools of its stages.
            return zeros(abstract) if stage.device_group.local else abstract

        return tuple(map(of_stage, self.stages, self.abstract_caches))

    @cached_property
    def _abstract_state(self) -> Any:
        """The abstract state of a micro-batch."""
        sizes, rows = self.sizes, self.lanes.rows
        make = partial(device_state.empty_state, rows, sizes.context, sizes.vocab)
        return self.home.abstract(jax.eval_shape(make))

    def empty_state(self) -> MicroBatchStates:
        """A state for each micro-batch, without running sequences."""
        if not self.home.local:
            return (self._abstract_state,) * self.lanes.count
        sizes, rows = self.sizes, self.lanes.rows
        states = [
            device_state.empty_state(rows, sizes.context, sizes.vocab)
            for _ in range(self.lanes.count)
        ]
        return tuple(jax.device_put(state, self.home.replicated) for state in states)

    def move(self, tree: Any, source: DeviceGroup | None, target: DeviceGroup) -> Any:
        """Arrays of one group of devices, or of the host, replicated on another; asynchronous.

        Args:
            source: where the arrays are; None: on the host.
        """
        return jax.tree.map(target.replicate, tree)

    def abstract_rows(self, count: int) -> tuple[Any, ...]:
        """The abstract results of "gather_blocks", for each stage with all its devices' shards."""

        def of_stage(stage: PipelineStage) -> Any:
            shapes, blocks = stage.model.model.caches, self.sizes.blocks
            pools = self._pools(stage, blocks, DeviceGroup(stage.device_group.devices[:1]))
            return stage.device_group.abstract(abstract_rows(shapes, pools, count), 0)

        return tuple(map(of_stage, self.stages))

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
        return self.compiled_chain(step, key)

    def compiled_chain(self, step: Step, key: StepKey) -> StepChain:
        """The chain of a step, with its programs; errors as of `program`."""
        leaves = tuple(leaf for stage in self.stages for leaf in stage.abstract_leaves)
        caches, states = self.abstract_caches, (self._abstract_state,) * self.lanes.count
        given = step.arguments
        match step:
            case StateStep():
                own: tuple[Any, ...] = (states,)
            case CacheStep():
                own = (caches,)
            case ForwardStep(begin=None) | EncoderStep():
                own = leaves, caches
            case ForwardStep():
                own = leaves, caches, states
            case TapStep():
                # Its tables are those of all micro-batches.
                given = *given[:2], abstract_tables(self.sizes, self.sizes.slots)
                own = (self.hidden_taps(caches),)
            case StepFunction():
                reason = f"there is no {key.kind} on several devices; leave out [partition]"
                raise EngineError(reason)
        calls = StepCalls(True, self._table, self.launch, self.move)
        StepChain(self, step, key, calls)(*own, *given)
        return StepChain(self, step, key, replace(calls, compiling=False))


@dataclass(frozen=True)
class StepChain:
    """A step on all stages: calls of its programs."""

    pipeline: Pipeline
    step: Any
    key: StepKey
    calls: StepCalls

    def __call__(self, *arguments: Any) -> Any:
        """The step's results, possibly still pending."""
        match self.step:
            case StateStep():
                return self._state_step(*arguments)
            case CacheStep():
                return self._cache_step(*arguments)
            case ForwardStep(begin=None):
                return self._stateless_step(*arguments)
            case ForwardStep():
                return self._forward_step(*arguments)
            case EncoderStep():
                return self._encoder_step(*arguments)
        return self._tap_step(*arguments)

    def _at_home(self, name: str, function: Any, lane: int, *given: Any, donated: Any = ()) -> Any:
        named: Any = {"key": (name, self.key), "donated": donated, "thread": f"lane {lane}"}
        return self.calls(name, self.pipeline.home, function, *given, **named)

    def _on_stage(
        self,
        number: int,
        name: str,
        function: Callable[..., Any],
        *given: Any,
        key: Any = (),
        donated: Any = (),
        out: Any = _REPLICATED,
    ) -> Any:
        stage = self.pipeline.stages[number]
        named: Any = {"key": (name, stage.kind, key), "thread": f"stage {number}"}
        named |= {"donated": donated, "out": out}
        return self.calls(f"{name} {number}", stage.device_group, function, *given, **named)

    def _in_lane(self, index: int, arguments: tuple[Any, ...]) -> tuple[int, tuple[Any, ...]]:
        """The micro-batch of a call, and the arguments with its rows in place of slots.

        Args:
            index: of the argument that names slots, or rows of a micro-batch.
        """
        if self.calls.compiling:
            return 0, arguments
        slots, lanes = arguments[index], self.pipeline.lanes
        rows: Any
        if isinstance(slots, MicroBatchRows):
            lane, rows = slots.lane, slots.rows
        elif isinstance(slots, Nodes):
            lane, owners = lanes.of_slots(np.asarray(slots.owners))
            rows = slots._replace(owners=cast("Any", owners))
        else:
            lane, rows = lanes.of_slots(np.atleast_1d(slots))
            rows = rows if np.ndim(slots) else rows[0]
        return lane, (*arguments[:index], rows, *arguments[index + 1 :])

    def _state_step(self, states: MicroBatchStates, *given: Any) -> Any:
        lane, own = self._in_lane(self.step.slots, given)
        function, changed = self.step.function, self.pipeline.lanes.changed
        result = self._at_home("state", function, lane, states[lane], *own, donated=0)
        if not self.step.returns:
            return changed(states, lane, result)
        state, output = result
        return changed(states, lane, state), output

    def _cache_step(self, caches: StageCaches, *given: Any) -> Any:
        step, results = self.step, list[Any]()
        for number, (stage, cache) in enumerate(zip(self.pipeline.stages, caches, strict=True)):
            function, own = partial(step.function, stage.model.model), list(given)
            if stage.host is not None:
                assert self.key.kind == "copy_blocks", "prefixes are not offloaded as well"
                thread, copy = f"stage {number}", self.pipeline.host_cache.copy
                results.append(copy(self.calls, thread, stage, function, cache, *given))
                continue
            if step.rows is not None:
                own[step.rows] = given[step.rows][number]
                if not self.calls.compiling:
                    own[step.rows] = jax.tree.map(partial(_split_rows, stage), own[step.rows])
            named: Any = {"key": self.key, "donated": () if step.reads else 0}
            named["out"] = _FIRST_AXIS if step.reads else self.pipeline.cache_specs[number]
            results.append(self._on_stage(number, "cache", function, cache, *own, **named))
        return tuple(results)

    def _stateless_step(self, leaves: Any, caches: StageCaches, batch: Any, *given: Any) -> Any:
        """A forward pass over a batch that comes from the host."""
        batch = FlatBatch(*batch)
        caches, _, results = self._decode(leaves, caches, batch, None, None, 0)
        finish = partial(self.step.finish, None)
        return caches, *self._at_home("finish", finish, 0, results, None, batch, *given)

    def _forward_step(
        self, leaves: Any, caches: StageCaches, states: MicroBatchStates, *given: Any
    ) -> Any:
        step, pipeline = self.step, self.pipeline
        tables, rest = step.without_tables(given)
        lane, own = self._in_lane(0, tuple(rest))
        batch, last, carried = self._at_home("begin", step.begin, lane, states[lane], {}, *own)
        # The tables of draft trees are by row of their nodes, the others by slot.
        if not (step.drafted or self.calls.compiling):
            tables = pipeline.lanes.tables(lane, tables)
        batch = batch._replace(tables=tables)
        decoded = self._decode(leaves, caches, batch, last, pipeline.home, lane)
        caches, inputs, results = decoded
        if not step.samples:  # nothing has to be computed
            if self.calls.compiling:
                return None
            logits, rows = step.finish(states[lane], results, carried, *own)
            return caches, logits, MicroBatchRows(lane, rows)
        finish = step.finish if step.loops is None else partial(_one_step, step.finish)
        given = states[lane], results, carried, *own
        state, output = self._at_home("finish", finish, lane, *given, donated=0)
        if step.drafted:
            caches = self._accept(caches, inputs, (batch, own[0].roots, output.tokens))
        return caches, pipeline.lanes.changed(states, lane, state), output

    def _decode(
        self,
        leaves: Any,
        caches: StageCaches,
        batch: FlatBatch,
        last: Any,
        source: DeviceGroup | None,
        lane: int,
    ) -> tuple[StageCaches, tuple[Any, ...], Any]:
        """The forward pass of all stages.

        Args:
            batch: its block tables are the host's.
            last: as of `decoder_forward`.
            source: where batch and `last` are; None: on the host.

        Returns:
            The caches, what `verify.accept_states` needs of each stage, and the results at home.
        """
        step, calls, pipeline = self.step, self.calls, self.pipeline
        x, before, done = None, None, list[tuple[Any, Any]]()
        placed: dict[DeviceGroup, tuple[FlatBatch, Any]] = {}

        def on(group: DeviceGroup) -> tuple[FlatBatch, Any]:
            if group not in placed:
                moved, chosen = calls.move((batch._replace(tables={}), last), source, group)
                tables = calls.move(batch.tables, None, group)
                placed[group] = moved._replace(tables=tables), chosen
            return placed[group]

        for number, stage in enumerate(pipeline.stages):
            group, cache, inputs = stage.device_group, caches[number], ()
            (here, chosen), hidden = on(group), calls.move(x, before, group)
            here, weights = with_own_images(here, stage), self._weights(number, leaves)
            if stage.host is not None:
                both = here, with_own_images(on(stage.host)[0], stage)
                thread = f"stage {number}"
                forward = pipeline.host_cache.forward
                cache, x = forward(calls, thread, stage, weights, cache, hidden, *both)
            else:
                wants, chosen = (step.wants, chosen) if stage.model.slice.last else ((), None)
                function = partial(_forward, stage.model, wants, step.drafted)
                named: Any = {"key": (wants, step.drafted), "donated": 1}
                named["out"] = (pipeline.cache_specs[number], _FIRST_AXIS), _REPLICATED
                given = weights, cache, hidden, here, chosen
                (cache, inputs), x = self._on_stage(number, "forward", function, *given, **named)
                del given
            # So that offloaded weights are freed as soon as the device has used them.
            del weights
            self._computed(number, x)
            done.append((cache, inputs))
            before = group
            if pipeline.observe is not None and not calls.compiling:
                pipeline.observe(number, lane, here.tokens if hidden is None else hidden, x)
        caches, every = zip(*done, strict=True)
        return caches, every, calls.first(x, pipeline.stages[-1].device_group)

    def _weights(self, number: int, leaves: Any) -> Any:
        """A stage's parameters, on its devices."""
        if number not in self.pipeline.streams or self.calls.compiling:
            return leaves[self.pipeline.stages[number].leaves]
        return self.pipeline.streams[number].take(number, leaves)

    def _computed(self, number: int, x: Any) -> None:
        """Notes a result of a stage whose weights are offloaded."""
        if number in self.pipeline.streams and not self.calls.compiling:
            self.pipeline.streams[number].computed(x)

    def _accept(
        self, caches: StageCaches, inputs: tuple[Any, ...], given: tuple[Any, ...]
    ) -> StageCaches:
        """The caches with recurrent states after the accepted nodes of draft trees."""
        changed, home = list(caches), self.pipeline.home
        for number, stage in enumerate(self.pipeline.stages):
            if STATE not in {shape.group for shape in stage.model.model.caches.values()}:
                continue
            here = self.calls.move(given, home, stage.device_group)
            named: Any = {"donated": 0, "out": self.pipeline.cache_specs[number]}
            own = caches[number], inputs[number], *here
            changed[number] = self._on_stage(number, "accept", _accepted, *own, **named)
        return tuple(changed)

    def _encoder_step(self, leaves: Any, caches: StageCaches, tokens: Any, *given: Any) -> Any:
        calls, pipeline = self.calls, self.pipeline
        if self.step.want is not None:
            result = self._encode(self.step.want, leaves, tokens, *given)
            return self._at_home("float", _float32, 0, result)
        lengths, table = given
        types = tokens if calls.compiling else np.zeros_like(tokens)
        encoded, filled = self._encode("hidden", leaves, tokens, types, lengths), list(caches)
        for number, stage in enumerate(pipeline.stages):
            cache, specs = caches[number], pipeline.cache_specs[number]
            if ENCODER not in {shape.group for shape in stage.model.model.caches.values()}:
                continue
            text = calls.move(encoded, pipeline.home, stage.device_group), lengths, table
            # The cache of cross-attention is always on the device.
            split = isinstance(cache, SplitPools)
            own = self._weights(number, leaves), cache.device if split else cache, *text
            named: Any = {"donated": 1, "out": specs.device if split else specs}
            result = self._on_stage(number, "fill", partial(_fill, stage.model), *own, **named)
            filled[number] = cache._replace(device=result) if split else result
            if stage.streamed and not calls.compiling:
                # The prefetcher cannot wait for the result, which the next step donates.
                jax.block_until_ready(result)
        return tuple(filled)

    def _encode(self, want: Want, leaves: Any, *texts: Any) -> Any:
        """A result of an encoder's forward pass through all stages, at home."""
        x, before = None, None
        for number, stage in enumerate(self.pipeline.stages):
            part, group = stage.model.slice, stage.device_group
            if not (part.first or part.last or part.layers["encoder"]):
                continue
            wants = (want,) if part.last else ()
            own = self._weights(number, leaves), self.calls.move(x, before, group), *texts
            function, before = partial(encoder_forward, stage.model, wants), group
            x = self._on_stage(number, "encode", function, *own, key=wants)
            del own
            self._computed(number, x)
        return self.calls.first(x, self.pipeline.stages[-1].device_group)[want]

    def _tap_step(self, layers: Any, *batch: Any) -> Any:
        hidden, home = [], self.pipeline.home
        for number, (stage, tapped) in enumerate(zip(self.pipeline.stages, layers, strict=True)):
            if tapped:
                states = self._on_stage(number, "taps", head_steps.gather_taps, tapped, *batch)
                hidden.append(self.calls.move(states, stage.device_group, home))
        return self._at_home("join", partial(jnp.concatenate, axis=-1), 0, hidden)


def _forward(
    stage: StageModel, wants: tuple[Want, ...], drafted: bool, leaves: Any, cache: Cache, *rest: Any
) -> Any:
    """As `decoder_forward`; what `_accepted` needs is apart from the cache, which it changes."""
    cache, out = decoder_forward(stage, wants, drafted, leaves, cache, *rest)
    return (split_inputs(cache) if drafted else (cache, ())), out


def _accepted(cache: Cache, inputs: tuple[Any, ...], *given: Any) -> Cache:
    return accept_states(join_inputs(cache, inputs), *given)


def _fill(stage: StageModel, leaves: Any, *rest: Any) -> Cache:
    return fill_encoded(stage.module(leaves), *rest)


def _float32(array: Any) -> Any:
    return array.astype(jnp.float32)


def _one_step(finish: Callable[..., Any], *arguments: Any) -> Any:
    """The results of a loop's step, the output with a leading axis of one step."""
    state, output = finish(*arguments)
    return state, jax.tree.map(lambda array: array[None], output)


def _split_rows(stage: PipelineStage, rows: Any) -> Any:
    """Rows of the host, each device's part on that device."""
    group = stage.device_group
    return group.join_shards(np.split(rows, len(group.devices)), 0)

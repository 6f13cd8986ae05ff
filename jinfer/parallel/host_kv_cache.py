"""KV cache offload: programs of layers that have some of their cache blocks in host memory.

Blocks with low numbers are on the device, the others on the host; the engine knows only numbers.
Blocks do not move. A layer's new queries, keys and values are copied to the host, which attends to
its blocks while the device attends to its own, and the partial results are merged
(`split_attention`). Recurrent states stay on the device: the last of a layer's programs computes
them. Each layer is several programs, launched in turn: only as a program of its own
can the host's attention use the CPU's custom calls and threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jax import Array

from jinfer.engine.runner import steps
from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.engine.runner.sampler_output import MAX_COPIES
from jinfer.engine.runner.step_forms import CacheStep
from jinfer.engine.runner.step_key import StepKey
from jinfer.engine.runner.step_table import int32
from jinfer.nn.abstract_model import Want
from jinfer.ops.attention.kv_cache import ENCODER, STATE, Cache
from jinfer.parallel import split_attention
from jinfer.parallel.block_transfer import BlockCopier, CacheMemory, gather_blocks, scatter_blocks
from jinfer.parallel.device_groups import DeviceGroup
from jinfer.parallel.pipeline_stage import PipelineStage, abstract_leaves, with_flat_parameters
from jinfer.parallel.stage_compiler import CompiledStage, StageCompiler, sharded_zeros

type Launch = Callable[..., Any]


class SplitPools(NamedTuple):
    """A stage's KV cache pools in device and host memory.

    An attention whose blocks are all in one memory has a pool only there.
    """

    device: Cache
    host: Cache


@dataclass(frozen=True)
class _AttentionPrograms:
    """The programs of one attention of a layer.

    Attributes:
        name: of its cache.
        group: the cache group.
        ask: computes its inputs.
        here: attention over the device's blocks; None where the device has none.
        there: attention over the host's blocks.
    """

    name: str
    group: str
    ask: Callable[..., Any]
    here: Callable[..., Any] | None
    there: Callable[..., Any]


@dataclass(frozen=True)
class _SplitLayer:
    """A layer's programs, called like one program of a stage."""

    stage: PipelineStage
    host: DeviceGroup
    attentions: tuple[_AttentionPrograms, ...]
    tell: Callable[..., Any]
    launch: Launch

    def __call__(
        self,
        leaves: Any,
        cache: SplitPools,
        x: Array,
        batch: FlatBatch,
        _: None,
        there: FlatBatch,
    ) -> tuple[SplitPools, Array]:
        """The pools and the layer's output.

        Args:
            there: `batch` in host memory.
        """
        device, host, attended = dict(cache.device), dict(cache.host), dict[str, Any]()
        cross, states = (_of_group(self.stage, device, group) for group in (ENCODER, STATE))
        for attention in self.attentions:
            name, group, partials = attention.name, attention.group, list[Any]()
            inputs = attention.ask(leaves, states | cross, x, batch, attended)
            # The device's attention is launched first: the host's waits for the inputs to arrive.
            if attention.here is not None:
                places = batch.rows, batch.positions, batch.tables[group]
                partial_result, device[name] = attention.here(inputs, device[name], *places)
                partials.append(partial_result)
            places = there.rows, there.positions, there.tables[group]
            arguments = self.host.replicate_tree(inputs), host[name], *places
            partial_result, host[name] = self.launch("host", attention.there, *arguments)
            attended[name] = (*partials, self.stage.device_group.replicate_tree(partial_result))
        states, out = self.tell(leaves, states, cross, x, batch, attended)
        return SplitPools(device | states, host), out


@dataclass(kw_only=True)
class HostCacheCompiler(StageCompiler):
    """Compiles the programs of stages some of which have cache blocks in host memory.

    Attributes:
        hosted: how many blocks of each cache group are on the host: those with the highest numbers.
        launch: launches the host's programs.
    """

    hosted: Mapping[str, int]
    launch: Launch

    def _there(self, stage: PipelineStage) -> tuple[DeviceGroup, Any]:
        """The host's device, and a stage's abstract pools there."""
        assert stage.host is not None, "the stage has blocks on the host"
        return stage.host, self.pools(stage, self.hosted, stage.host)

    def cache(self, stage: PipelineStage) -> Any:
        """A stage's abstract pools on its devices."""
        if stage.host is None:
            return super().cache(stage)
        total = self.sizes.blocks
        return self.pools(stage, {group: self._boundary(group) for group in total})

    def _boundary(self, group: str) -> int:
        """The first block of a group that is on the host."""
        return self.sizes.blocks[group] - self.hosted.get(group, 0)

    def empty_cache(self, stage: PipelineStage) -> Any:
        """As `StageCompiler.empty_cache`, in both memories."""
        device = super().empty_cache(stage)
        if stage.host is None:
            return device
        return SplitPools(device, sharded_zeros(self._there(stage)[1]))

    def _decoder(
        self,
        stage: PipelineStage,
        x: Any,
        batch: FlatBatch,
        last: Any,
        wants: tuple[Want, ...],
        drafted: bool,
    ) -> CompiledStage:
        if stage.host is None:
            return super()._decoder(stage, x, batch, last, wants, drafted)
        device_group, (host, pools) = stage.device_group, self._there(stage)
        device, caches = self.cache(stage), stage.model.model.caches
        cross, states = (_of_group(stage, device, group) for group in (ENCODER, STATE))
        attentions, attended = list[_AttentionPrograms](), dict[str, Any]()
        leaves = abstract_leaves(stage)

        def traced(part: Callable[..., Any], donated: Any, *own: Any) -> CompiledStage:
            function, given = with_flat_parameters(stage, part), (x, batch, attended)
            return self.compile_stage(stage, function, donated, (leaves, *own), given, False)

        for _ in pools:
            question = split_attention.TracedAttention()
            ask = partial(split_attention.before_attention, stage.model, question)
            inputs = traced(ask, (), states | cross)
            name, group = question.name, caches[question.name].group
            begin, end = self._boundary(group), self.sizes.blocks[group]
            places = batch.rows, batch.positions, batch.tables[group]
            attend = partial(self._part, question, inputs.out, places)
            on_host = attend((begin, end), pools[name], host)
            on_device = attend((0, begin), device[name], device_group) if begin else None
            partials = [made.out[0] for made in (on_device, on_host) if made is not None]
            attended[name] = tuple(partials)
            programs = None if on_device is None else on_device.program, on_host.program
            attentions.append(_AttentionPrograms(name, group, inputs.program, *programs))
        rest = traced(partial(split_attention.after_attention, stage.model), 1, states, cross)
        layer = _SplitLayer(stage, host, tuple(attentions), rest.program, self.launch)
        return CompiledStage(layer, (SplitPools(device, pools), rest.out[1]))

    def _part(
        self,
        question: split_attention.TracedAttention,
        asked: Any,
        places: tuple[Any, Any, Any],
        blocks: tuple[int, int],
        pool: Any,
        device_group: DeviceGroup,
    ) -> CompiledStage:
        """`split_attention.partial_attention` over the blocks of one memory."""
        inputs, *batch = device_group.abstract_replicated((asked, *places))
        arguments = inputs, pool, *batch
        function = partial(split_attention.partial_attention, question.rules, blocks)
        key = "part", device_group, blocks, repr(question.rules), repr(arguments)
        return self.cached(key, lambda: self.compile(function, 1, arguments, device_group))

    def fill(self, number: int, encoded: Any) -> CompiledStage:
        """As `StageCompiler.fill`; the cross-attention's cache is always on the device."""
        made = super().fill(number, encoded)
        if self.stages[number].host is None:
            return made

        def run(leaves: Any, cache: SplitPools, *rest: Any) -> SplitPools:
            return cache._replace(device=made.program(leaves, cache.device, *rest))

        return CompiledStage(run, made.out)

    def of_cache(self, number: int, key: StepKey, step: CacheStep) -> CompiledStage:
        """As `StageCompiler.of_cache`; blocks are copied also between device and host."""
        stage = self.stages[number]
        if stage.host is None:
            return super().of_cache(number, key, step)
        assert key.kind == "copy_blocks", "prefixes are not offloaded with `host_kv_cache`"
        model, (host, pools) = stage.model.model, self._there(stage)
        boundaries = {group: self._boundary(group) for group in self.sizes.blocks}
        both = {name for name in pools if boundaries[model.caches[name].group]}
        which = {group: int32(MAX_COPIES) for group in self.sizes.blocks}
        blocks = self.pools(stage, dict.fromkeys(self.hosted, MAX_COPIES)) if both else {}

        def made(
            name: str, function: Any, donated: Any, given: Any, device_group: DeviceGroup
        ) -> Any:
            compile = partial(self.compile, partial(function, model), donated, given, device_group)
            # Device and host may be one CPU device.
            return self.cached((name, repr(given), device_group, stage.kind), compile).program

        places = []
        for device_group, own in ((stage.device_group, self.cache(stage)), (host, pools)):
            some = {name: own[name] for name in both}
            ids, new = device_group.abstract_replicated((which, blocks))
            given = own, ids, ids, *device_group.abstract_replicated((int32(),))
            copy, take, put = made("copy", steps.copy_blocks, 0, given, device_group), None, None
            if both:
                take = made("take", gather_blocks, (), (some, ids), device_group)
                put = made("put", scatter_blocks, 0, (own, new, ids), device_group)
            # The stage's thread runs all of this; to launch there again would be a deadlock.
            launch = partial(self.launch, "host") if device_group is host else _call
            places.append(CacheMemory(device_group, copy, take, put, launch))
        exchange = BlockCopier(boundaries, frozenset(both), (places[0], places[1]))

        def run(cache: SplitPools, *given: Any) -> SplitPools:
            return SplitPools(*exchange((cache.device, cache.host), *given))

        return CompiledStage(run, SplitPools(self.cache(stage), pools))


def _of_group(stage: PipelineStage, pools: Cache, group: str) -> Cache:
    """The pools of one cache group."""
    caches = stage.model.model.caches
    return {name: pool for name, pool in pools.items() if caches[name].group == group}


def _call(program: Callable[..., Any], *given: Any) -> Any:
    return program(*given)

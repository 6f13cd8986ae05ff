"""Offload to the host: weights that are prefetched, and KV cache blocks that are attended to there.

Weights of some layers stay in pinned host memory; those of the next such layer are copied while the
current one computes (double buffering). `partition.streamed_layers` says how many layers.

With `partition.host_kv_cache`, cache blocks with low numbers are on the device, the others on the
host; the engine knows only numbers, and blocks do not move. A layer's new queries, keys and values
are copied to the host, which attends to its blocks while the device attends to its own, and the
partial results are merged (`split_attention`). Recurrent states stay on the device: the last of a
layer's programs computes them. Each layer is several programs, launched in turn: only as a program
of its own can the host's attention use the CPU's custom calls and threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, SingleDeviceSharding

from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.ops.attention.kv_blocks import gather_rows, scatter_rows
from jinfer.ops.attention.kv_cache import ENCODER, STATE, Cache
from jinfer.parallel.split_attention import (
    TracedAttention,
    after_attention,
    before_attention,
    partial_attention,
)
from jinfer.parallel.stage_model import PipelineStage
from jinfer.parallel.stage_programs import StepCalls

type Ids = Mapping[str, np.ndarray]  # cache group -> block ids


@dataclass
class WeightPrefetcher:
    """Copies the weights of offloaded stages to their devices, one stage ahead.

    At most two stages' weights are on the device: before the next copy starts, the stage before
    the current one has ended, and its weights are free.

    Attributes:
        turns: the offloaded stages of a group of devices, in order, by number; where each has its
            parameters among those of all stages. After the last comes the first.
    """

    turns: Mapping[int, slice]
    _brought: dict[int, tuple[Array, ...]] = field(default_factory=dict)
    _before: Any = None

    def take(self, number: int, leaves: tuple[Array, ...]) -> tuple[Array, ...]:
        """The weights of a stage, on its devices; the caller drops them after use.

        Args:
            leaves: the weights of all stages.
        """
        if number not in self._brought:
            self._brought.clear()  # prefetched for a pass that ended early
        jax.block_until_ready(self._before)
        weights = self._brought.pop(number, None) or _on_device(leaves[self.turns[number]])
        order = list(self.turns)
        following = order[(order.index(number) + 1) % len(order)]
        self._brought[following] = _on_device(leaves[self.turns[following]])
        return weights

    def computed(self, out: Any) -> None:
        """Records the result of the stage that last took its weights; it may not be donated."""
        self._before = out

    def forget(self) -> None:
        """Drops the prefetched weights."""
        self._brought, self._before = {}, None


def _on_device(leaves: tuple[Array, ...]) -> tuple[Array, ...]:
    """Arrays in pinned host memory, copied to the memory of their devices."""
    shardings = tuple(
        NamedSharding(there.mesh, there.spec)
        if isinstance(there := leaf.sharding, NamedSharding)
        else SingleDeviceSharding(*there.device_set)
        for leaf in leaves
    )
    return tuple(jax.device_put(leaves, shardings))


class SplitPools(NamedTuple):
    """A stage's KV cache pools in device and host memory.

    An attention whose blocks are all in one memory has a pool only there.
    """

    device: Cache
    host: Cache


@dataclass(frozen=True)
class HostKVCache:
    """The programs of layers that have some of their cache blocks in host memory.

    Attributes:
        blocks: how many blocks of each cache group there are.
        hosted: how many of them are on the host: those with the highest numbers.
    """

    blocks: Mapping[str, int]
    hosted: Mapping[str, int]
    _traced: dict[tuple[str, int], TracedAttention] = field(default_factory=dict)

    @cached_property
    def first(self) -> dict[str, int]:
        """The first block of each group that is on the host."""
        return {group: n - self.hosted.get(group, 0) for group, n in self.blocks.items()}

    def forward(
        self,
        calls: StepCalls,
        thread: str,
        stage: PipelineStage,
        leaves: tuple[Array, ...],
        cache: SplitPools,
        x: Any,
        batch: FlatBatch,
        there: FlatBatch,
    ) -> tuple[SplitPools, Any]:
        """The forward pass of a stage of one layer.

        Args:
            thread: the stage's launching thread.
            there: `batch` in host memory.
        """
        assert stage.host is not None, "the stage has blocks on the host"
        group, host_group, model = stage.device_group, stage.host, stage.model
        device, host, attended = dict(cache.device), dict(cache.host), dict[str, Any]()
        cross, states = (_of_group(stage, device, kind) for kind in (ENCODER, STATE))

        def attend(attention: TracedAttention, inputs: Any, pools: Cache, on_host: bool) -> Any:
            """Attention over the blocks of one memory; the pool is changed."""
            name, where = attention.name, host_group if on_host else group
            cache_group = model.model.caches[name].group
            first, here = self.first[cache_group], there if on_host else batch
            span = (first, self.blocks[cache_group]) if on_host else (0, first)
            given = calls.move(inputs, group, where), pools[name]
            places = here.rows, here.positions, here.tables[cache_group]
            function = partial(partial_attention, attention.rules, span)
            named: Any = {"key": ("part", span, repr(attention.rules)), "donated": 1}
            named["thread"] = "host" if on_host else thread
            title = f"{thread} {name} {'host' if on_host else 'device'}"
            result, pools[name] = calls(title, where, function, *given, *places, **named)
            return result

        for index in range(len(host)):
            attention = self._traced.setdefault((stage.kind, index), TracedAttention())
            ask = partial(before_attention, model, attention)
            own = leaves, states | cross, x, batch, attended
            named: Any = {"key": ("ask", stage.kind, index), "thread": thread}
            inputs = calls(f"{thread} ask {index}", group, ask, *own, **named)
            name, partials = attention.name, list[Any]()
            # The device's attention is launched first: the host's waits for the inputs to arrive.
            if name in device:
                partials.append(attend(attention, inputs, device, on_host=False))
            result = attend(attention, inputs, host, on_host=True)
            attended[name] = (*partials, calls.move(result, host_group, group))
        rest, given = partial(after_attention, model), (states, cross, x, batch, attended)
        named = {"key": ("rest", stage.kind), "donated": 1, "thread": thread}
        states, out = calls(f"{thread} rest", group, rest, leaves, *given, **named)
        return SplitPools(device | states, host), out

    def copy(
        self,
        calls: StepCalls,
        thread: str,
        stage: PipelineStage,
        function: Callable[..., Any],
        cache: SplitPools,
        sources: Ids,
        targets: Ids,
        count: Any,
    ) -> SplitPools:
        """The pools of a stage, with `count` blocks copied from `sources` to `targets`.

        No source may be the target of an earlier copy.

        Args:
            function: copies blocks of one memory, see `steps.copy_blocks`.
        """
        assert stage.host is not None, "the stage has blocks on the host"
        groups, shapes = (stage.device_group, stage.host), stage.model.model.caches
        if calls.compiling:
            sources = targets = {g: np.zeros(ids.shape, np.int32) for g, ids in sources.items()}
        above = {g: (sources[g] >= n, targets[g] >= n) for g, n in self.first.items()}
        crosses = calls.compiling or any((a != b).any() for a, b in above.values())
        names = [name for name in cache.host if name in cache.device]
        incoming, copied = list[Any](), list[Cache]()

        def ids_in(place: int, ids: Ids, inside: Ids, other: int) -> dict[str, np.ndarray]:
            """Ids in one memory of the copies `inside` it; for the others a constant."""
            shift = {g: place * n for g, n in self.first.items()}
            return {g: np.where(inside[g], ids[g] - shift[g], np.int32(other)) for g in ids}

        def call(title: str, place: int, function: Any, *given: Any, donated: Any = ()) -> Any:
            named: Any = {"key": (title, stage.kind), "thread": "host" if place else thread}
            title = f"{thread} {title} {place}"
            return calls(title, groups[place], function, *given, **named, donated=donated)

        if crosses and names:
            # Gather all blocks that cross before anything is overwritten.
            for place in (0, 1):
                split = {name: cache[place][name] for name in names}
                leaving = {g: a == place for g, (a, _) in above.items()}
                ids = ids_in(place, sources, leaving, 0)
                rows = call("take", place, partial(gather_rows, shapes), split, ids)
                incoming.insert(0, calls.move(rows, groups[place], groups[1 - place]))
        for place in (0, 1):
            # Copies that are not within this memory become a copy of its first block onto itself.
            inside = {g: (a == place) & (b == place) for g, (a, b) in above.items()}
            both = [ids_in(place, each, inside, 0) for each in (sources, targets)]
            pools = call("copy", place, function, cache[place], *both, count, donated=0)
            if incoming:
                arriving = {g: (a != b) & (b == place) for g, (a, b) in above.items()}
                given = pools, incoming[place], ids_in(place, targets, arriving, -1)
                pools = call("put", place, partial(_put, shapes, names), *given, donated=0)
            copied.append(pools)
        return SplitPools(*copied)


def _put(shapes: Any, names: list[str], cache: Cache, rows: Any, ids: Any) -> Cache:
    split = {name: cache[name] for name in names}
    return {**cache, **scatter_rows(shapes, split, rows, ids)}


def _of_group(stage: PipelineStage, pools: Cache, group: str) -> Cache:
    """The pools of one cache group."""
    caches = stage.model.model.caches
    return {name: pool for name, pool in pools.items() if caches[name].group == group}

"""Memory budget: bytes of weights and KV cache in each device's memory and in the host's.

From these follows how many KV cache blocks fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jinfer.engine.scheduling.cache_size import block_bytes, cache_blocks, fewest_blocks
from jinfer.modelspec.model_spec import EngineSpec
from jinfer.modelspec.partition_table import CPU
from jinfer.ops.attention.kv_cache import ENCODER, STATE, CacheShapes, nbytes
from jinfer.parallel.stage_model import StageModel
from jinfer.quant_format import Kind

HOST = "host"  # the name of the host's memory


@dataclass(frozen=True)
class StageMemory:
    """The memory that each device of a pipeline stage needs, in bytes.

    Attributes:
        devices: their names; "cpu" for the host.
        weights: bytes of weights that stay on the device, without `tables`.
        tables: bytes of embedding tables.
        layers: bytes of each layer of the main stack.
        streamed: layers whose weights are offloaded; their bytes are not in `weights`.
        caches: shapes of the KV cache per token.
    """

    devices: tuple[str, ...]
    weights: int
    tables: int
    layers: Mapping[int, int]
    streamed: frozenset[int]
    caches: CacheShapes

    @property
    def on_host(self) -> bool:
        """Whether the stage runs on the host."""
        return CPU in self.devices

    @property
    def prefetch_buffers(self) -> int:
        """Bytes of the two offloaded layers that are on the device at a time (double buffering)."""
        return 2 * max((self.layers[layer] for layer in self.streamed), default=0)

    @property
    def waiting(self) -> int:
        """Bytes of all offloaded weights, in host memory."""
        return len(self.devices) * sum(self.layers[layer] for layer in self.streamed)

    @property
    def used(self) -> int:
        """Bytes of a device's memory that are needed in addition to the KV cache."""
        return self.weights + self.tables + self.prefetch_buffers

    def with_streamed(self, streamed: frozenset[int]) -> StageMemory:
        """The same with other layers offloaded."""
        before, after = (
            sum(self.layers[layer] for layer in offloaded & self.layers.keys())
            for offloaded in (self.streamed, streamed)
        )
        of_stage = frozenset(streamed & self.layers.keys())
        return replace(self, streamed=of_stage, weights=self.weights + before - after)


def stage_memory(stage: StageModel, devices: tuple[str, ...], main: str) -> StageMemory:
    """The memory that each device of a stage needs, with nothing offloaded.

    Args:
        main: the stack whose layers may be offloaded.
    """
    model = stage.model
    # The layers' numbers in the stage's parameter names, and in the whole model.
    numbers = {str(index): layer for index, layer in enumerate(stage.slice.layers[main])}
    layers = dict.fromkeys(numbers.values(), 0)
    weights = tables = 0
    for name, parameter, role in zip(model.names, model.parameters, model.roles, strict=True):
        size = nbytes(parameter)
        stack, number, *_ = (*name.split("."), "")
        if stack == main and number in numbers:
            layers[numbers[number]] += size
        if role == "table":
            tables += size
        else:
            weights += size
    return StageMemory(devices, weights, tables, layers, frozenset(), model.caches)


@dataclass(frozen=True)
class CacheBlocks:
    """KV cache blocks of each cache group.

    Attributes:
        total: blocks on the device and on the host together.
        hosted: how many of them are in host memory (KV cache offload).
    """

    total: Mapping[str, int]
    hosted: Mapping[str, int]


def fit_cache_blocks(
    stages: Sequence[StageMemory],
    kind: Kind,
    engine: EngineSpec,
    context: int,
    fraction: float,
    free: Callable[[str], float],
) -> CacheBlocks:
    """The KV cache blocks that every stage has room for: all stages share the block tables.

    Args:
        kind: dtype of the KV cache.
        fraction: fraction of the blocks that are in host memory; states are not.
        free: a function from a device's name, or `HOST`, to its free bytes.
    """
    counts = list[Mapping[str, int]]()
    # Weights in host memory: of stages that run there, and offloaded ones.
    host_room = free(HOST) - sum(s.used if s.on_host else s.waiting for s in stages)
    device_stages = sum(not stage.on_host for stage in stages)
    for stage in stages:
        room = own = min(map(free, stage.devices)) - stage.used
        if fraction and not stage.on_host:
            limits = [host_room / device_stages / fraction]
            limits += [room / (1 - fraction)] if fraction < 1 else []
            room = min(limits)
        fit = partial(cache_blocks, stage.caches, kind, engine, context)
        blocks = fit(free=int(min(room, 1e18)))
        if STATE in blocks:  # all are on the device
            blocks[STATE] = fit(free=int(min(own, 1e18)))[STATE]
        counts.append(blocks)
    total = fewest_blocks(counts)
    hosted = {
        group: min(count, max(1, min(round(fraction * count), count - (fraction < 1))))
        for group, count in total.items()
        if fraction and group not in (ENCODER, STATE)
    }
    return CacheBlocks(total, hosted)


@dataclass(frozen=True)
class MemoryUse:
    """What is in one memory, in bytes.

    Attributes:
        name: the device's number, or `HOST`.
        weights: weights that stay there, without `tables`.
        tables: embedding tables.
        streamed: offloaded weights: on a device the buffers for two layers, on the host all.
        cache: KV cache.
        free: bytes of the memory.
    """

    name: str
    weights: float
    tables: float
    streamed: float
    cache: float
    free: float

    @property
    def together(self) -> float:
        """Bytes in use."""
        return self.weights + self.tables + self.streamed + self.cache


def memory_use(
    stages: Sequence[StageMemory], kind: Kind, blocks: CacheBlocks, free: Callable[[str], float]
) -> list[MemoryUse]:
    """What is in each memory; the host's comes last, if anything is in it."""
    devices, on_host = list[MemoryUse](), list[tuple[float, ...]]()
    for stage in stages:
        sizes = block_bytes(stage.caches, kind)
        cache = sum(size * blocks.total[group] for group, size in sizes.items())
        offloaded = sum(size * blocks.hosted.get(group, 0) for group, size in sizes.items())
        if stage.on_host:
            on_host.append((stage.weights, stage.tables, 0, cache))
            continue
        on_host.append((0, 0, stage.waiting, offloaded))
        on_device = cache - offloaded
        devices += [
            MemoryUse(
                name, stage.weights, stage.tables, stage.prefetch_buffers, on_device, free(name)
            )
            for name in stage.devices
        ]
    weights, tables, streamed, cached = (sum(each) for each in zip(*on_host, strict=True))
    host = MemoryUse(HOST, weights, tables, streamed, cached, free(HOST))
    return [*devices, *([host] if host.together else [])]


def worst_overflow(memories: Sequence[MemoryUse]) -> MemoryUse | None:
    """The memory that lacks most bytes; None where everything fits."""
    worst: Any = max(memories, key=lambda place: place.together - place.free)
    return worst if worst.together > worst.free else None

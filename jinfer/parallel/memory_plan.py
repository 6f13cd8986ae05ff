"""Memory plan: what goes into which memory, before anything is loaded, or why it does not fit.

Bytes of weights and KV cache in each device's memory and in the host's give the number of cache
blocks that fit. Where the devices' memory does not suffice, `devices = "auto"` offloads to the host
what the cost model finds fastest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from jinfer.engine.scheduling.cache_size import (
    block_bytes,
    cache_blocks,
    fewest_blocks,
    free_memory,
    host_memory,
)
from jinfer.loader.weights.model_size import bytes_text
from jinfer.modelspec.partition_table import AUTO, CPU, PartitionSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.ops.attention.kv_cache import BLOCK, ENCODER, STATE, CacheShapes, nbytes
from jinfer.parallel.cost_model import Hardware, device_layouts, estimate_decode
from jinfer.parallel.layer_plan import PartitionPlan, spread_evenly
from jinfer.parallel.placement import (
    ModelToPlace,
    hardware_of,
    host_cache_refusal,
    main_stack,
    model_cost,
    partition_plan,
    stage_models,
    streamed_layers,
)
from jinfer.parallel.stage_model import StageModel

HOST = "host"  # the name of the host's memory
_STEP = 0.05  # between fractions of the KV cache that are tried on the host
_SHOWN = 4  # ways to make a model fit that a report lists

type FreeMemory = Callable[[str], float]  # a device's name, or `HOST` -> its free bytes


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
        if self.on_host:
            return self
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
    sizes = {True: 0, False: 0}  # of tables, and of all other weights
    for name, parameter, role in zip(model.names, model.parameters, model.roles, strict=True):
        sizes[role == "table"] += nbytes(parameter)
        stack, number, *_ = (*name.split("."), "")
        if stack == main and number in numbers:
            layers[numbers[number]] += nbytes(parameter)
    return StageMemory(devices, sizes[False], sizes[True], layers, frozenset(), model.caches)


@dataclass(frozen=True)
class CacheBlocks:
    """KV cache blocks of each cache group.

    Attributes:
        total: blocks on the device and on the host together.
        hosted: how many of them are in host memory (KV cache offload).
    """

    total: Mapping[str, int]
    hosted: Mapping[str, int]


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

    def __str__(self) -> str:
        return self.name if self.name == HOST else f"device {self.name}"

    @property
    def together(self) -> float:
        """Bytes in use."""
        return self.weights + self.tables + self.streamed + self.cache


@dataclass(frozen=True)
class MemoryPlan:
    """What goes into which memory.

    Attributes:
        places: what is in each memory; the host's comes last, if anything is in it.
        blocks: the KV cache's blocks.
        state_bytes: of one sequence's recurrent states; 0: it has none.
        problem: why it does not fit, and what would; "" where it fits.
    """

    places: tuple[MemoryUse, ...]
    blocks: CacheBlocks
    state_bytes: int = 0
    problem: str = ""

    @property
    def overflow(self) -> MemoryUse | None:
        """The memory that lacks most bytes; None where everything fits."""
        worst = max(self.places, key=lambda place: place.together - place.free)
        return worst if worst.together > worst.free else None

    def __str__(self) -> str:
        """A table, a row for each memory."""
        lines: list[tuple[str, ...]] = [
            ("memory", "weights", "tables", "streamed", "cache", "together", "of")
        ]
        for place in self.places:
            sizes = place.weights, place.tables, place.streamed, place.cache, place.together
            free = bytes_text(place.free) if place.free < float("inf") else "-"
            lines.append((str(place), *map(bytes_text, sizes), free))
        return "\n".join([*aligned(lines), *self._room()])

    def _room(self) -> list[str]:
        """The lines that say how many states and tokens the cache has room for."""
        total = self.blocks.total
        each = bytes_text(self.state_bytes)
        states = f"room for {total.get(STATE, 0)} recurrent states of {each}"
        lines = [states] if self.state_bytes else []
        blocks = {group: n for group, n in total.items() if group not in (ENCODER, STATE)}
        if not blocks:
            return lines
        # Groups of sliding-window layers have fewer blocks: they hold a window only.
        largest = max(blocks, key=lambda group: blocks[group])
        hosted = self.blocks.hosted.get(largest, 0)
        on_host = f", {hosted * BLOCK:,} of them on the host" if hosted else ""
        return [*lines, f"room for {blocks[largest] * BLOCK:,} tokens in the cache{on_host}"]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


@dataclass(frozen=True)
class MemoryPlanner:
    """Makes memory plans, with more or less offloaded to the host.

    Attributes:
        free: a function from a device's name, or `HOST`, to its free bytes.
        stages: the memory that each stage needs with nothing offloaded.
        streamed: layers whose weights the specification offloads.
        may_host_cache: whether a part of the KV cache may be offloaded.
    """

    whole: ModelToPlace
    free: FreeMemory
    stages: tuple[StageMemory, ...]
    streamed: frozenset[int]
    may_host_cache: bool

    def requested(self) -> MemoryPlan:
        """The plan with the specification's own offload; its `problem` says if it does not fit."""
        plan = self.plan(self.whole.spec.partition.host_kv_cache, self.streamed)
        lacking = plan.overflow
        return plan if lacking is None else replace(plan, problem=self._problem(lacking))

    def plan(self, share: float, streamed: frozenset[int]) -> MemoryPlan:
        """The plan with a fraction of the KV cache and some layers' weights offloaded."""
        stages = [stage.with_streamed(streamed) for stage in self.stages]
        blocks, kind = self._blocks(stages, share), self.whole.kind
        on_device, on_host = list[MemoryUse](), list[tuple[float, ...]]()
        state_bytes = 0
        for stage in stages:
            sizes = block_bytes(stage.caches, kind)
            state_bytes += sizes.get(STATE, 0)
            cache = sum(size * blocks.total[group] for group, size in sizes.items())
            hosted = sum(size * blocks.hosted.get(group, 0) for group, size in sizes.items())
            if stage.on_host:
                on_host.append((stage.weights, stage.tables, 0, cache))
                continue
            on_host.append((0, 0, stage.waiting, hosted))
            held = stage.weights, stage.tables, stage.prefetch_buffers, cache - hosted
            on_device += [MemoryUse(name, *held, self.free(name)) for name in stage.devices]
        weights, tables, waiting, cached = (sum(each) for each in zip(*on_host, strict=True))
        host = MemoryUse(HOST, weights, tables, waiting, cached, self.free(HOST))
        places = (*on_device, *([host] if host.together else []))
        return MemoryPlan(places, blocks, state_bytes)

    def _blocks(self, stages: Sequence[StageMemory], share: float) -> CacheBlocks:
        """The blocks that every stage has room for: all stages share the block tables.

        Args:
            share: fraction of the blocks that are in host memory; states are not.
        """
        engine, counts = self.whole.spec.engine, list[Mapping[str, int]]()
        # Weights in host memory: of stages that run there, and offloaded ones.
        host_room = self.free(HOST) - sum(s.used if s.on_host else s.waiting for s in stages)
        device_stages = sum(not stage.on_host for stage in stages)
        for stage in stages:
            room = own = min(map(self.free, stage.devices)) - stage.used
            if share and not stage.on_host:
                limits = [host_room / device_stages / share]
                limits += [room / (1 - share)] if share < 1 else []
                room = min(limits)
            fit = partial(cache_blocks, stage.caches, self.whole.kind, engine, self.whole.context)
            blocks = fit(free=int(min(room, 1e18)))
            if STATE in blocks:  # all are on the device
                blocks[STATE] = fit(free=int(min(own, 1e18)))[STATE]
            counts.append(blocks)
        total = fewest_blocks(counts)
        hosted = {
            group: min(count, max(1, min(round(share * count), count - (share < 1))))
            for group, count in total.items()
            if share and group not in (ENCODER, STATE)
        }
        return CacheBlocks(total, hosted)

    def _problem(self, lacking: MemoryUse) -> str:
        keys = next(self.fitting_offloads(), {})
        settings = "; ".join(f"partition.{key} = {value}" for key, value in keys.items())
        otherwise = (
            "quantize to fewer bits (quantization.weights), set engine.context or "
            "engine.kv_tokens lower, or take more devices"
        )
        return (
            f"{lacking} would hold {bytes_text(lacking.together)} (weights "
            f"{bytes_text(lacking.weights + lacking.tables + lacking.streamed)}, cache "
            f"{bytes_text(lacking.cache)}) but has {bytes_text(lacking.free)}; "
            f"{f'set {settings}' if settings else otherwise}"
        )

    def fitting_offloads(self) -> Iterator[Mapping[str, Any]]:
        """Keys of `[partition]` that make it fit: for each kind of offload the smallest change."""
        part = self.whole.spec.partition
        share, count = part.host_kv_cache, part.streamed_layers
        layers = sorted(layer for s in self.stages if not s.on_host for layer in s.layers)
        shares = [round(_STEP * i, 2) for i in range(1, round(1 / _STEP) + 1) if _STEP * i > share]
        if not self.may_host_cache:
            shares = []
        # One or two offloaded layers save nothing: the device has buffers for two.
        counts = range(max(3, count + 1), len(layers) + 1)
        for keys in (
            [{"host_kv_cache": larger} for larger in shares],
            [{"streamed_layers": more} for more in counts],
            [{"host_kv_cache": 1.0, "streamed_layers": more} for more in counts if shares],
        ):
            for each in keys:
                streamed = spread_evenly(layers, int(each.get("streamed_layers", count)))
                if self.plan(each.get("host_kv_cache", share), streamed).overflow is None:
                    yield each
                    break


def memory_planner(plan: PartitionPlan, whole: ModelToPlace, free: FreeMemory) -> MemoryPlanner:
    """The memory planner of a partition plan.

    Args:
        free: a function from a device's name in the plan, or `HOST`, to its free bytes.

    Raises:
        SpecError: the specification asks for what is not possible with any amount of memory.
    """
    spec, refusal = whole.spec, host_cache_refusal(plan, whole.spec)
    if spec.partition.host_kv_cache and refusal:
        raise SpecError(spec.path, "partition.host_kv_cache", refusal)
    stages = tuple(
        stage_memory(stage, planned.devices, main_stack(spec))
        for stage, planned in zip(stage_models(plan, whole), plan.stages, strict=True)
    )
    streamed, engine = streamed_layers(plan, spec), spec.engine
    # Blocks of a prefix cache in addition to the device's come from there.
    offloads_prefixes = engine.cache_ram > 0 or engine.cache_disk is not None
    may_host_cache = not (offloads_prefixes or refusal)
    return MemoryPlanner(whole, free, stages, streamed, may_host_cache)


@dataclass(frozen=True)
class OffloadOption:
    """A way to make a model fit.

    Attributes:
        keys: keys of `[partition]` and their values.
        step: estimated seconds of a decode step.
    """

    keys: Mapping[str, Any]
    step: float

    def __str__(self) -> str:
        """The keys as they would be written in TOML."""
        values = {key: f'"{v}"' if isinstance(v, str) else str(v) for key, v in self.keys.items()}
        return ", ".join(f"{key} = {value.lower()}" for key, value in values.items())


def resolve_auto(whole: ModelToPlace) -> tuple[ModelToPlace, str]:
    """The model with the offload that "auto" chooses, and a report that says why.

    Nothing changes where the devices' memory suffices, where the specification sets a key of host
    memory itself, and where the devices are CPUs.
    """
    part = whole.spec.partition
    if part.devices is None or part.devices.strip() != AUTO or not has_own_memory(jax.devices()):
        return whole, ""
    if part.host_embeddings or part.host_kv_cache or part.cpu_layers or part.streamed_layers:
        return whole, ""
    free, count = free_memories(), len(jax.devices())
    if _fits(whole, {}, free):
        return whole, ""
    options = offload_options(whole, hardware_of(jax.devices()), count, free)
    if not options:
        return whole, ""
    noun = f"{count} devices" if count > 1 else "one device"
    report = [f'devices = "{AUTO}": the model alone does not fit on {noun}; what would, estimated:']
    for number, option in enumerate(options[:_SHOWN]):
        taken = ", taken" if number == 0 else ""
        report.append(f"  {option}: {option.step * 1e3:.1f} ms a token{taken}")
    return whole.with_partition(**options[0].keys), "\n".join(report)


def has_own_memory(devices: Sequence[jax.Device]) -> bool:
    """Whether the devices have memory apart from the host's."""
    return devices[0].platform != CPU


def free_memories() -> FreeMemory:
    """A function from a device's number, or `HOST`, to its free bytes."""
    free = {str(number): free_memory(device) for number, device in enumerate(jax.devices())}
    host = host_memory()
    return lambda name: free.get(name, host)


def offload_options(
    whole: ModelToPlace, machine: Hardware, count: int, free: FreeMemory
) -> list[OffloadOption]:
    """The offload options that fit on so many devices and the host, the fastest first.

    Args:
        machine: the speeds of a device.
        free: a function from a device's number, or `HOST`, to its free bytes.
    """
    work, options = model_cost(whole), list[OffloadOption]()
    for layout in device_layouts(count):
        if layout[0] > work.layers:
            continue
        pipe, tensor = layout
        stages = [range(stage * tensor, (stage + 1) * tensor) for stage in range(pipe)]
        devices = ";".join("&".join(map(str, stage)) for stage in stages)
        for keys in _fitting_changes(whole, devices, free):
            context, part = whole.context, PartitionSpec(**keys)
            cost = estimate_decode(work, machine, *layout, context=context, offload=part)
            options.append(OffloadOption({"devices": devices, **keys}, cost.step))
    return sorted(options, key=lambda option: (option.step, len(option.keys)))


def _fitting_changes(
    whole: ModelToPlace, devices: str, free: FreeMemory
) -> Iterator[Mapping[str, Any]]:
    """For each kind of offload, the smallest change that fits."""
    for start in ({}, {"host_embeddings": True}):
        if (planner := _planner(whole, {"devices": devices, **start}, free)) is None:
            continue  # the model cannot be divided among these devices
        if not planner.requested().problem:
            yield start
            continue
        for more in planner.fitting_offloads():
            yield {**start, **more}
    layers = max(map(len, whole.weights.layers.values()))
    fewest = bisect_left(
        range(1, layers),
        True,
        key=lambda n: _fits(whole, {"devices": devices, "cpu_layers": n}, free),
    )
    if fewest < layers - 1:
        yield {"cpu_layers": fewest + 1}


def _planner(
    whole: ModelToPlace, keys: Mapping[str, Any], free: FreeMemory
) -> MemoryPlanner | None:
    """The memory planner with these keys of `[partition]`; None where they are not possible."""
    changed = whole.with_partition(**keys)
    try:
        return memory_planner(partition_plan(changed, dry_run=True), changed, free)
    except SpecError:
        return None


def _fits(whole: ModelToPlace, keys: Mapping[str, Any], free: FreeMemory) -> bool:
    planner = _planner(whole, keys, free)
    return planner is not None and planner.requested().overflow is None

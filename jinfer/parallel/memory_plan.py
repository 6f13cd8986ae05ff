"""Memory plan: what goes into which memory, before anything is loaded, or why it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jinfer.engine.scheduling.cache_size import block_bytes
from jinfer.loader.weights.model_size import bytes_text
from jinfer.ops.attention.kv_cache import BLOCK, ENCODER, STATE
from jinfer.parallel.layer_plan import PartitionPlan
from jinfer.parallel.memory_budget import (
    HOST,
    CacheBlocks,
    MemoryUse,
    StageMemory,
    fit_cache_blocks,
    memory_use,
    stage_memory,
    worst_overflow,
)
from jinfer.parallel.placement import (
    ModelToPlace,
    check_host_cache,
    host_cache_refusal,
    main_stack,
    stage_models,
    streamed_layers,
)
from jinfer.parallel.substages import spread_evenly

_STEP = 0.05  # between fractions of the KV cache that are tried on the host


@dataclass(frozen=True)
class MemoryPlan:
    """What goes into which memory.

    Attributes:
        places: what is in each memory.
        blocks: the KV cache's blocks.
        state_bytes: of one sequence's recurrent states; 0: it has none.
        problem: why it does not fit, and what would; "" where it fits.
    """

    places: tuple[MemoryUse, ...]
    blocks: CacheBlocks
    state_bytes: int = 0
    problem: str = ""

    def __str__(self) -> str:
        """A table, a row for each memory."""
        lines: list[tuple[str, ...]] = [
            ("memory", "weights", "tables", "streamed", "cache", "together", "of")
        ]
        for place in self.places:
            sizes = place.weights, place.tables, place.streamed, place.cache, place.together
            free = bytes_text(place.free) if place.free < float("inf") else "-"
            lines.append((_name(place), *map(bytes_text, sizes), free))
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        rows = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*rows, *self._room()])

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


@dataclass(frozen=True)
class MemoryPlanner:
    """Makes memory plans, with more or less offloaded to the host.

    Attributes:
        free: a function from a device's name, or `HOST`, to its free bytes.
        holdings: the memory that each stage needs with nothing offloaded.
        streamed: layers whose weights the specification offloads.
        may_host_cache: whether a part of the KV cache may be offloaded.
    """

    whole: ModelToPlace
    free: Callable[[str], float]
    holdings: tuple[StageMemory, ...]
    streamed: frozenset[int]
    may_host_cache: bool

    def asked(self) -> MemoryPlan:
        """The plan with the specification's own offload; its `problem` says if it does not fit."""
        plan = self.plan(self.whole.spec.partition.host_kv_cache, self.streamed)
        lacking = worst_overflow(plan.places)
        return plan if lacking is None else replace(plan, problem=_refusal(self, lacking))

    def plan(self, share: float, streamed: frozenset[int]) -> MemoryPlan:
        """The plan with a fraction of the KV cache and some layers' weights offloaded."""
        stages = [s if s.on_host else s.with_streamed(streamed) for s in self.holdings]
        kind, engine, context = self.whole.kind, self.whole.spec.engine, self.whole.context
        blocks = fit_cache_blocks(stages, kind, engine, context, share, self.free)
        of_states = sum(block_bytes(stage.caches, kind).get(STATE, 0) for stage in stages)
        return MemoryPlan(tuple(memory_use(stages, kind, blocks, self.free)), blocks, of_states)

    def fits(self, share: float, streamed: frozenset[int]) -> bool:
        """Whether that plan fits into all memories."""
        return worst_overflow(self.plan(share, streamed).places) is None


def memory_planner(
    plan: PartitionPlan, whole: ModelToPlace, free: Callable[[str], float]
) -> MemoryPlanner:
    """The memory planner of a partition plan.

    Args:
        free: a function from a device's name in the plan, or `HOST`, to its free bytes.

    Raises:
        SpecError: the specification asks for what is not possible with any amount of memory.
    """
    check_host_cache(plan, whole.spec)
    stages, main = stage_models(plan, whole), main_stack(whole.spec)
    holdings = tuple(
        stage_memory(stage, planned.devices, main)
        for stage, planned in zip(stages, plan.stages, strict=True)
    )
    streamed, engine = streamed_layers(plan, whole.spec), whole.spec.engine
    # Blocks of a prefix cache beside the device's come from there (`jinfer.api.build_engine`).
    keeps = engine.cache_ram > 0 or engine.cache_disk is not None
    may_host_cache = not (keeps or host_cache_refusal(plan, whole.spec))
    return MemoryPlanner(whole, free, holdings, streamed, may_host_cache)


def _refusal(planner: MemoryPlanner, lacking: MemoryUse) -> str:
    reason = (
        f"{_name(lacking)} would hold {bytes_text(lacking.together)} (weights "
        f"{bytes_text(lacking.weights + lacking.tables + lacking.streamed)}, cache "
        f"{bytes_text(lacking.cache)}) but has {bytes_text(lacking.free)}"
    )
    keys = next(fitting_offloads(planner), {})
    settings = "; ".join(f"partition.{key} = {value}" for key, value in keys.items())
    otherwise = (
        "quantize to fewer bits (quantization.weights), set engine.context or "
        "engine.kv_tokens lower, or take more devices"
    )
    return f"{reason}; {f'set {settings}' if settings else otherwise}"


def _name(place: MemoryUse) -> str:
    return place.name if place.name == HOST else f"device {place.name}"


def fitting_offloads(planner: MemoryPlanner) -> Iterator[Mapping[str, Any]]:
    """Keys of `[partition]` that make it fit: for each kind of offload the smallest change."""
    stages, spec = planner.holdings, planner.whole.spec
    share, count = spec.partition.host_kv_cache, spec.partition.streamed_layers
    layers = sorted(layer for stage in stages if not stage.on_host for layer in stage.layers)
    shares = [round(_STEP * i, 2) for i in range(1, round(1 / _STEP) + 1) if _STEP * i > share]
    if not planner.may_host_cache:
        shares = []
    # One or two offloaded layers save nothing: the device has buffers for two.
    counts = range(max(3, count + 1), len(layers) + 1)
    streamed = spread_evenly(layers, count) if count else frozenset()
    for larger in shares:
        if planner.fits(larger, streamed):
            yield {"host_kv_cache": larger}
            break
    for more in counts:
        if planner.fits(share, spread_evenly(layers, more)):
            yield {"streamed_layers": more}
            break
    for more in counts if shares else ():
        if planner.fits(1.0, spread_evenly(layers, more)):
            yield {"host_kv_cache": 1.0, "streamed_layers": more}
            break

"""The memory plan: what goes where, before anything is loaded, or why it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax.typing import DTypeLike

from jinfer.modelspec.cache_dtype import Kind
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.attention.kv_cache import BLOCK, ENCODER
from jinfer.parallel.layer_plan import Plan
from jinfer.parallel.memory_budget import (
    HOST,
    Blocks,
    Holding,
    Place,
    holding,
    places,
    sized,
    too_full,
)
from jinfer.parallel.placement import check_host_cache, main_stack, stage_models, streamed_layers
from jinfer.parallel.substages import spread
from jinfer.weights.model_size import bytes_text

_STEP = 0.05  # of shares that are tried


@dataclass(frozen=True)
class MemoryPlan:
    """What goes where.

    Attributes:
        places: memories, and what is in each.
        blocks: of the cache.
        problem: why it does not fit, and what would; "" where it does.
    """

    places: tuple[Place, ...]
    blocks: Blocks
    problem: str = ""

    def __str__(self) -> str:
        """A table, a row for each memory."""
        lines: list[tuple[str, ...]] = [
            ("memory", "weights", "tables", "streamed", "cache", "together", "of")
        ]
        for place in self.places:
            parts = place.weights, place.tables, place.streamed, place.cache, place.together
            there = bytes_text(place.free) if place.free < float("inf") else "-"
            lines.append((_name(place), *(bytes_text(part) for part in parts), there))
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        rows = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*rows, *self._room()])

    def _room(self) -> list[str]:
        """What the cache has room for."""
        own = {group: count for group, count in self.blocks.total.items() if group != ENCODER}
        if not own:
            return []
        # Attentions that look back a window alone have blocks for that.
        most = max(own, key=lambda group: own[group])
        apart = self.blocks.hosted.get(most, 0)
        there = f", {apart * BLOCK:,} of them on the host" if apart else ""
        return [f"room for {own[most] * BLOCK:,} tokens in the cache{there}"]


@dataclass(frozen=True)
class Sizing:
    """All that a memory plan follows from but what may be changed to make it fit.

    Attributes:
        kind, context: of the cache.
        free: bytes of a device's memory, by its name, and of `HOST`.
        holdings: of each stage, with all its weights on its devices.
        streamed: layers whose weights the specification keeps on the host.
    """

    spec: ModelSpec
    kind: Kind
    context: int
    free: Callable[[str], float]
    holdings: tuple[Holding, ...]
    streamed: frozenset[int]

    def asked(self) -> MemoryPlan:
        """As the specification has it, or why that does not fit."""
        found = self.plan(self.spec.partition.host_kv_cache, self.streamed)
        lacking = too_full(found.places)
        return found if lacking is None else replace(found, problem=_refusal(self, lacking))

    def plan(self, share: float, streamed: frozenset[int]) -> MemoryPlan:
        """With a share of the cache on the host, and some layers' weights."""
        own = [each.with_streamed(_on_devices(each, streamed)) for each in self.holdings]
        blocks = sized(own, self.kind, self.spec.engine, self.context, share, self.free)
        return MemoryPlan(tuple(places(own, self.kind, blocks, self.free)), blocks)

    def fits(self, share: float, streamed: frozenset[int]) -> bool:
        """Whether all memories have room for that."""
        return too_full(self.plan(share, streamed).places) is None


def _on_devices(held: Holding, streamed: frozenset[int]) -> frozenset[int]:
    return frozenset() if held.on_host else streamed


def memory_plan(
    plan: Plan,
    spec: ModelSpec,
    model: AbstractModel,
    dtype: DTypeLike,
    kind: Kind,
    context: int,
    free: Callable[[str], float],
) -> MemoryPlan:
    """What goes where; arguments and errors as of `sizing_of`."""
    return sizing_of(plan, spec, model, dtype, kind, context, free).asked()


def sizing_of(
    plan: Plan,
    spec: ModelSpec,
    model: AbstractModel,
    dtype: DTypeLike,
    kind: Kind,
    context: int,
    free: Callable[[str], float],
) -> Sizing:
    """What the memory plans of a plan of devices follow from.

    Args:
        model: with its parameters as they will be stored.
        kind, context: of the cache.
        free: bytes of a device's memory, by its name in the plan, and of `HOST`.

    Raises:
        SpecError: what it asks for cannot be, whatever there is of memory.
    """
    check_host_cache(plan, spec)
    stages, main = stage_models(plan, spec, model, dtype), main_stack(spec)
    holdings = tuple(
        holding(stage, row.devices, main) for stage, row in zip(stages, plan.rows, strict=True)
    )
    return Sizing(spec, kind, context, free, holdings, streamed_layers(plan, spec))


def _refusal(sizing: Sizing, lacking: Place) -> str:
    reason = (
        f"{_name(lacking)} would hold {bytes_text(lacking.together)} (weights "
        f"{bytes_text(lacking.weights + lacking.tables + lacking.streamed)}, cache "
        f"{bytes_text(lacking.cache)}) but has {bytes_text(lacking.free)}"
    )
    keys = next(remedies(sizing), {})
    settings = "; ".join(f"partition.{key} = {value}" for key, value in keys.items())
    otherwise = (
        "quantize to fewer bits (quantization.weights), set engine.context or "
        "engine.kv_tokens lower, or take more devices"
    )
    return f"{reason}; {f'set {settings}' if settings else otherwise}"


def _name(place: Place) -> str:
    return place.name if place.name == HOST else f"device {place.name}"


def remedies(sizing: Sizing) -> Iterator[Mapping[str, Any]]:
    """Keys of `[partition]` that make it fit: of each kind of change the least that does."""
    own = sizing.spec.partition
    share, count = own.host_kv_cache, own.streamed_layers
    layers = sorted(layer for held in sizing.holdings if not held.on_host for layer in held.layers)
    shares = [round(_STEP * i, 2) for i in range(1, round(1 / _STEP) + 1) if _STEP * i > share]
    if sizing.spec.decoder is None or any(len(held.devices) > 1 for held in sizing.holdings):
        shares = []
    counts = range(max(3, count + 1), len(layers) + 1)
    now = spread(layers, count) if count else frozenset()
    for other in shares:
        if sizing.fits(other, now):
            yield {"host_kv_cache": other}
            break
    for more in counts:
        if sizing.fits(share, spread(layers, more)):
            yield {"streamed_layers": more}
            break
    for more in counts if shares else ():
        if sizing.fits(1.0, spread(layers, more)):
            yield {"host_kv_cache": 1.0, "streamed_layers": more}
            break

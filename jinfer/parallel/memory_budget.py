"""How much of the cache there is room for, and what of a model goes into which memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinfer.engine.scheduling.cache_size import block_bytes, cache_blocks
from jinfer.modelspec.cache_dtype import Kind
from jinfer.modelspec.model_spec import EngineSpec
from jinfer.modelspec.partition_table import CPU
from jinfer.ops.attention.kv_cache import ENCODER, CacheShape
from jinfer.parallel.layer_bytes import nbytes
from jinfer.parallel.sharding_rules import Part
from jinfer.parallel.stage import StageModel

HOST = "host"


@dataclass(frozen=True)
class Holding:
    """What each device of a stage holds, in bytes.

    Attributes:
        devices: their names; "cpu" for the host.
        weights: that stay there, without the tables...
        tables: ...which are looked up by tokens.
        layers: of each layer of the stack that is cut.
        streamed: which of these layers stay in host memory; their weights are not in `weights`.
        caches: what is kept of each token.
    """

    devices: tuple[str, ...]
    weights: int
    tables: int
    layers: Mapping[int, int]
    streamed: frozenset[int]
    caches: Mapping[str, CacheShape]

    @property
    def on_host(self) -> bool:
        """Whether the host computes it."""
        return CPU in self.devices

    @property
    def passing(self) -> int:
        """Of the weights of two layers, one of which is computed while the other comes."""
        return 2 * max((self.layers[layer] for layer in self.streamed), default=0)

    @property
    def waiting(self) -> int:
        """Of all weights that stay in host memory."""
        return len(self.devices) * sum(self.layers[layer] for layer in self.streamed)

    @property
    def used(self) -> int:
        """Of a device's memory, without the cache."""
        return self.weights + self.tables + self.passing

    def with_streamed(self, streamed: frozenset[int]) -> Holding:
        """The same with other layers that stay in host memory."""
        before, after = (
            sum(self.layers[layer] for layer in which & self.layers.keys())
            for which in (self.streamed, streamed)
        )
        own = frozenset(streamed & self.layers.keys())
        return replace(self, streamed=own, weights=self.weights + before - after)


def holding(stage: StageModel, devices: tuple[str, ...], main: str) -> Holding:
    """What each device of a stage holds, with all its weights.

    Args:
        main: the stack that is cut into stages.
    """
    model, own = stage.model, _layers(stage.part, main)
    layers = dict.fromkeys(own.values(), 0)
    weights = tables = 0
    for name, parameter, role in zip(model.names, model.parameters, model.roles, strict=True):
        size = nbytes(parameter)
        stack, number, *_ = (*name.split("."), "")
        if stack == main and number in own:
            layers[own[number]] += size
        if role == "table":
            tables += size
        else:
            weights += size
    return Holding(devices, weights, tables, layers, frozenset(), model.caches)


def _layers(part: Part, main: str) -> dict[str, int]:
    """A stage's words for its layers, and the whole model's numbers of them."""
    return {str(index): layer for index, layer in enumerate(part.layers[main])}


@dataclass(frozen=True)
class Blocks:
    """Blocks of each group.

    Attributes:
        total: of all places together.
        hosted: of those, how many are in host memory.
    """

    total: Mapping[str, int]
    hosted: Mapping[str, int]


def sized(
    holdings: Sequence[Holding],
    kind: Kind,
    engine: EngineSpec,
    context: int,
    share: float,
    free: Callable[[str], float],
) -> Blocks:
    """Blocks that every stage has room for: tables are the same for all of them.

    Args:
        kind: of the cache's numbers.
        share: of the blocks that are in host memory.
        free: bytes of a device's memory, by its name, and of `HOST`.
    """
    total: dict[str, int] = {}
    on_host = free(HOST) - _host_weights(holdings)
    divided = sum(not each.on_host for each in holdings)
    for own in holdings:
        room = min(map(free, own.devices)) - own.used
        if share and not own.on_host:
            places = [on_host / divided / share, *([room / (1 - share)] if share < 1 else [])]
            room = min(places)
        found = cache_blocks(
            own.caches,
            kind,
            slots=engine.slots,
            context=context,
            chunk=engine.prefill_chunk,
            tokens=engine.kv_tokens,
            used=0,
            free=int(min(room, 1e18)),
        )
        for group, count in found.items():
            total[group] = min(count, total.get(group, count))
    hosted = {
        group: min(count, max(1, min(round(share * count), count - (share < 1))))
        for group, count in total.items()
        if share and group != ENCODER
    }
    return Blocks(total, hosted)


def _host_weights(holdings: Sequence[Holding]) -> float:
    """Bytes of weights in host memory."""
    return sum(each.used if each.on_host else each.waiting for each in holdings)


@dataclass(frozen=True)
class Place:
    """A memory, and what is in it, in bytes.

    Attributes:
        weights: that stay there...
        tables: ...and those of them that are looked up by tokens.
        streamed: on a device room for the weights that pass, on the host all of them.
        free: what there is of it.
    """

    name: str
    weights: float
    tables: float
    streamed: float
    cache: float
    free: float

    @property
    def together(self) -> float:
        """All that is in it."""
        return self.weights + self.tables + self.streamed + self.cache


def places(
    holdings: Sequence[Holding], kind: Kind, blocks: Blocks, free: Callable[[str], float]
) -> list[Place]:
    """What is in each memory; the host's comes last, if anything is in it."""
    found, host = list[Place](), Place(HOST, 0, 0, 0, 0, free(HOST))
    for own in holdings:
        sizes = block_bytes(own.caches, kind)
        whole = sum(size * blocks.total[group] for group, size in sizes.items())
        apart = sum(size * blocks.hosted.get(group, 0) for group, size in sizes.items())
        if own.on_host:
            host = _more(host, own.weights, own.tables, 0, whole)
            continue
        host = _more(host, 0, 0, own.waiting, apart)
        found += [
            Place(name, own.weights, own.tables, own.passing, whole - apart, free(name))
            for name in own.devices
        ]
    return [*found, *([host] if host.together else [])]


def _more(place: Place, *more: float) -> Place:
    weights, tables, streamed, cache = more
    return replace(
        place,
        weights=place.weights + weights,
        tables=place.tables + tables,
        streamed=place.streamed + streamed,
        cache=place.cache + cache,
    )


def too_full(found: Sequence[Place]) -> Place | None:
    """The memory that lacks most; None where all fits."""
    worst: Any = max(found, key=lambda place: place.together - place.free)
    return worst if worst.together > worst.free else None

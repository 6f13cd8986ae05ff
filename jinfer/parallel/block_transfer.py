"""KV cache offload: copies cache blocks on the device, on the host, and between the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.attention.kv_cache import Cache
from jinfer.parallel.device_groups import DeviceGroup

if TYPE_CHECKING:
    from jaxtyping import Int

type Ids = Mapping[str, np.ndarray]


def gather_blocks(
    model: AbstractModel, cache: Cache, ids: Mapping[str, Int[Array, " copies"]]
) -> Cache:
    """Gathers blocks of each layer's cache; an id out of range gives an arbitrary block."""

    def blocks_of(name: str) -> Any:
        blocks = ids[model.caches[name].group]
        return jax.tree.map(lambda pool: pool.at[blocks].get(mode="clip"), cache[name])

    return {name: blocks_of(name) for name in cache}


def scatter_blocks(
    model: AbstractModel, cache: Cache, blocks: Cache, ids: Mapping[str, Int[Array, " copies"]]
) -> Cache:
    """Scatters blocks into the cache; those with a negative id are dropped."""

    def updated(name: str) -> Any:
        targets = ids[model.caches[name].group]
        return jax.tree.map(
            lambda pool, new: pool.at[jnp.where(targets >= 0, targets, pool.shape[0])].set(
                new, mode="drop"
            ),
            cache[name],
            blocks[name],
        )

    return {name: updated(name) if name in blocks else cache[name] for name in cache}


@dataclass(frozen=True)
class CacheMemory:
    """A memory that has some of a cache's blocks, and the programs that copy them.

    Attributes:
        device_group: the device, or the host's.
        copy: copies blocks within the memory.
        take: gathers blocks for the other memory; None where that has none.
        put: scatters blocks from the other memory; None where that has none.
        launch: launches these programs.
    """

    device_group: DeviceGroup
    copy: Callable[..., Any]
    take: Callable[..., Any] | None
    put: Callable[..., Any] | None
    launch: Callable[..., Any]


@dataclass(frozen=True)
class BlockCopier:
    """Copies blocks of a stage's cache that is split between device and host.

    Attributes:
        boundaries: for each cache group, the first block that is on the host.
        both: names of the layers' caches that have blocks in both memories.
        places: the device and the host.
    """

    first_host_blocks: Mapping[str, int]
    both: frozenset[str]
    places: tuple[CacheMemory, CacheMemory]

    def __call__(
        self, caches: tuple[Cache, Cache], sources: Ids, targets: Ids, count: Any
    ) -> list[Cache]:
        """The pools of both memories, with `count` blocks copied from `sources` to `targets`.

        No source may be the target of an earlier copy.
        """
        groups = list(sources)
        begin = {group: self.first_host_blocks[group] for group in groups}
        above = {g: (sources[g] >= begin[g], targets[g] >= begin[g]) for g in groups}
        crosses = any(bool((source != target).any()) for source, target in above.values())
        incoming: list[Any] = [None, None]
        shift = [dict.fromkeys(groups, 0), begin]
        if crosses:
            # Gather all blocks that cross before anything is overwritten.
            for index, place in enumerate(self.places):
                assert place.take is not None, "there are blocks in both memories"
                split = {name: caches[index][name] for name in self.both}
                ids = {g: sources[g] - shift[index][g] for g in groups}
                blocks = place.launch(place.take, split, ids)
                incoming[1 - index] = self.places[1 - index].device_group.replicate_tree(blocks)
        copied = []
        for index, place in enumerate(self.places):
            inside = {g: (a == index) & (b == index) for g, (a, b) in above.items()}
            # Copies that are not within this memory become a copy of its first block onto itself.
            local_ids = [
                {g: np.where(inside[g], ids[g] - shift[index][g], np.int32(0)) for g in groups}
                for ids in (sources, targets)
            ]
            cache = place.launch(place.copy, caches[index], *local_ids, count)
            if crosses:
                assert place.put is not None, "as above"
                ids = {
                    g: np.where((a != b) & (b == index), targets[g] - shift[index][g], np.int32(-1))
                    for g, (a, b) in above.items()
                }
                cache = place.launch(place.put, cache, incoming[index], ids)
            copied.append(cache)
        return copied

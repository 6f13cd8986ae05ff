"""Copies of blocks where some are on the device and others on the host."""

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
from jinfer.parallel.device_groups import Site

if TYPE_CHECKING:
    from jaxtyping import Int

type Ids = Mapping[str, np.ndarray]


def take(model: AbstractModel, cache: Cache, ids: Mapping[str, Int[Array, " copies"]]) -> Cache:
    """Some blocks of each attention; an id that is none gives any block."""

    def taken(name: str) -> Any:
        own = ids[model.caches[name].group]
        return jax.tree.map(lambda pool: pool.at[own].get(mode="clip"), cache[name])

    return {name: taken(name) for name in cache}


def put(
    model: AbstractModel, cache: Cache, blocks: Cache, ids: Mapping[str, Int[Array, " copies"]]
) -> Cache:
    """The cache with blocks of another place; one whose id is below 0 is put nowhere."""

    def into(name: str) -> Any:
        own = ids[model.caches[name].group]
        return jax.tree.map(
            lambda pool, new: pool.at[jnp.where(own >= 0, own, pool.shape[0])].set(
                new, mode="drop"
            ),
            cache[name],
            blocks[name],
        )

    return {name: into(name) if name in blocks else cache[name] for name in cache}


@dataclass(frozen=True)
class Place:
    """Where some of a cache's blocks are, and the programs that copy them.

    Attributes:
        copy: within the place.
        take, put: to and from another place; None where there is no other.
        launch: launches them.
    """

    site: Site
    copy: Callable[..., Any]
    take: Callable[..., Any] | None
    put: Callable[..., Any] | None
    launch: Callable[..., Any]


@dataclass(frozen=True)
class Exchange:
    """Copies blocks within the two places of a stage's cache, and between them.

    Attributes:
        boundaries: of each group the first block that is in the second place.
        both: attentions that have blocks in both.
    """

    boundaries: Mapping[str, int]
    both: frozenset[str]
    places: tuple[Place, Place]

    def __call__(
        self, caches: tuple[Cache, Cache], sources: Ids, targets: Ids, count: Any
    ) -> list[Cache]:
        """The pools of both places, with blocks copied.

        Of none of them the source is a block that one before has for its target.
        """
        groups = list(sources)
        begin = {group: self.boundaries[group] for group in groups}
        above = {g: (sources[g] >= begin[g], targets[g] >= begin[g]) for g in groups}
        crosses = any(bool((one != other).any()) for one, other in above.values())
        coming: list[Any] = [None, None]
        shift = [dict.fromkeys(groups, 0), begin]
        if crosses:
            # Before anything is overwritten.
            for index, place in enumerate(self.places):
                assert place.take is not None, "there are blocks in both places"
                some = {name: caches[index][name] for name in self.both}
                ids = {g: sources[g] - shift[index][g] for g in groups}
                found = place.launch(place.take, some, ids)
                coming[1 - index] = self.places[1 - index].site.taken(found)
        done = []
        for index, place in enumerate(self.places):
            own = {g: (a == index) & (b == index) for g, (a, b) in above.items()}
            # What is no copy of this place copies its first block onto itself.
            each = [
                {g: np.where(own[g], ids[g] - shift[index][g], np.int32(0)) for g in groups}
                for ids in (sources, targets)
            ]
            cache = place.launch(place.copy, caches[index], *each, count)
            if crosses:
                assert place.put is not None, "as above"
                ids = {
                    g: np.where((a != b) & (b == index), targets[g] - shift[index][g], np.int32(-1))
                    for g, (a, b) in above.items()
                }
                cache = place.launch(place.put, cache, coming[index], ids)
            done.append(cache)
        return done

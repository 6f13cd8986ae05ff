"""Loading: each device gets its own part of a parameter as soon as that is read."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import Array

from jinfer.engine.scheduling.cache_size import trim
from jinfer.ops.backend import target
from jinfer.parallel.device_groups import HOST_MEMORY
from jinfer.parallel.layer_bytes import nbytes
from jinfer.parallel.shard_params import as_here, cut, once
from jinfer.parallel.stage import Source
from jinfer.parallel.stage_programs import Stage
from jinfer.weights.plan_weights import Weights
from jinfer.weights.row_slices import Rows

_KEPT = 32 << 20  # bytes that were cut into parts, and may be free but not the system's yet


def load_stages(
    weights: Weights, stages: Sequence[Stage], *, progress: bool = False
) -> tuple[Array, ...]:
    """The parameters of all stages in their parts, one stage's after the other's.

    The host has as many parameters at a time as threads read them, and nothing else of the model.
    Of stages that are in other processes nothing is read, and there are abstract arrays.
    """
    wanted: dict[str, list[tuple[int, int]]] = {}
    here = [(number, stage) for number, stage in enumerate(stages) if stage.site.here]
    for number, stage in here:
        for index, source in enumerate(stage.model.sources):
            wanted.setdefault(source.name, []).append((number, index))
    found: dict[tuple[int, int], Any] = {}
    freed = 0

    def place(names: Sequence[str], values: Any) -> None:
        nonlocal freed
        here: dict[Any, Any] = {}
        for name in names:
            for number, index in wanted.get(name, ()):
                source = stages[number].model.sources[index]
                key = number, _key(source.shares), source.once
                if key not in here:
                    here[key] = _placed(stages[number], source, values)
                found[number, index] = here[key]
        jax.block_until_ready(here)
        freed += nbytes(values.values if isinstance(values, Rows) else values)
        if freed > _KEPT:  # where two threads count at once, a little later
            freed = 0
            trim()

    rows = {
        name: rows_of([(stages[n], stages[n].model.sources[i]) for n, i in each])
        for name, each in wanted.items()
    }
    weights.place(place, progress, rows)
    gc.collect(0)  # JAX lets go of the arrays that parts were made of
    trim()
    absent = [stage.site.of_parts(stage.model.model.parameters) for stage in stages]
    return tuple(
        leaf
        for number, stage in enumerate(stages)
        for index in range(len(stage.model.sources))
        for leaf in jax.tree.leaves(found.get((number, index), absent[number][index]))
    )


def _key(shares: Mapping[int, Any]) -> Any:
    return tuple(sorted(shares.items()))


def rows_of(wanted: Sequence[tuple[Stage, Source]]) -> range | None:
    """The rows of a parameter that this process's devices have, of several stages; None: all."""
    begin, end, total = [], [], 0
    for stage, source in wanted:
        share = source.shares.get(len(source.shape) - 2)
        if share is None or len(source.shape) < 2:
            return None
        total = share.total
        for device in stage.site.here:
            if share.counts[device]:
                begin.append(share.starts[device])
                end.append(share.starts[device] + share.counts[device])
    if not begin or max(end) - min(begin) == total:
        return None
    return range(min(begin), max(end))


def _placed(stage: Stage, source: Source, values: Any) -> Any:
    """A parameter of a stage, on its devices."""
    site, shares = stage.site, source.shares
    if isinstance(values, Rows):
        axis = len(source.shape) - 2
        share, begin = shares[axis], values.begin
        moved = tuple(start - begin for start in share.starts)
        shares, values = {**shares, axis: replace(share, starts=moved)}, values.values
    with target(site.platform):
        values = as_here(values)
    parts = [cut(values, shares, device) for device in site.here]
    if source.once:
        parts = [once(part, device) for device, part in zip(site.here, parts, strict=True)]
    memory = HOST_MEMORY if stage.streamed else None
    return jax.tree.map(lambda *each: site.joined(each, memory), *parts)

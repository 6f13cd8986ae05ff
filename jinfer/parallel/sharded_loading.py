"""Sharded loading: each device gets its shard of a parameter as soon as the parameter is read."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import Array

from jinfer.engine.scheduling.cache_size import trim
from jinfer.loader.weights.load_weights import load
from jinfer.loader.weights.plan_weights import WeightPlan
from jinfer.loader.weights.read_parameter import RowSlice
from jinfer.loader.weights.storage_plan import packed_for_target
from jinfer.ops.attention.kv_cache import nbytes
from jinfer.ops.backend import target_platform
from jinfer.parallel.device_groups import HOST_MEMORY
from jinfer.parallel.shard_params import slice_shard
from jinfer.parallel.stage_model import ParameterSource, PipelineStage

_TRIM_BYTES = 32 << 20  # freed bytes after which the allocator returns memory to the system


def load_stages(
    plan: WeightPlan, stages: Sequence[PipelineStage], *, progress: bool = False
) -> tuple[Array, ...]:
    """The sharded parameters of all stages, in the order of the stages.

    Host memory holds only the parameters that are being read, one per reader thread. Nothing is
    read for stages of other processes; abstract arrays stand for their parameters.
    """
    leaves = [leaf for stage in stages for leaf in stage.abstract_leaves]
    users: dict[str, list[tuple[PipelineStage, ParameterSource, slice]]] = {}
    for stage, source, place in _parameters(stages):
        users.setdefault(source.name, []).append((stage, source, place))
    freed = 0

    def put(names: Sequence[str], values: Any) -> None:
        nonlocal freed
        done: dict[Any, list[Array]] = {}
        for name in names:
            for stage, source, place in users.get(name, ()):
                # Tied parameters of a stage are one.
                key = id(stage), tuple(sorted(source.shardings.items())), source.first_only
                if key not in done:
                    done[key] = jax.tree.leaves(_put_on_devices(stage, source, values))
                leaves[place] = done[key]
        jax.block_until_ready(list(done.values()))
        freed += nbytes(values.values if isinstance(values, RowSlice) else values)
        if freed > _TRIM_BYTES:  # threads may race on the count; the trim then comes a little later
            freed = 0
            trim()

    rows = {
        name: local_rows([(stage, source) for stage, source, _ in used])
        for name, used in users.items()
        if name in plan.plain.names
    }
    load(plan, put, rows, progress=progress)
    for name in users.keys() - set(plan.plain.names):  # adapters, of which none is loaded yet
        _, source, place = users[name][0]
        put([name], np.zeros(source.shape, leaves[place][0].dtype))
    gc.collect(0)  # releases the whole arrays that JAX still refers to
    trim()
    return tuple(leaves)


def replaced_leaves(
    stages: Sequence[PipelineStage], leaves: Sequence[Array], values: Mapping[str, np.ndarray]
) -> tuple[Array, ...]:
    """The leaves of all stages with other values of some parameters, none of them quantized.

    Args:
        leaves: as of `load_stages`.
        values: name of each parameter in the whole model -> its values.
    """
    changed = list(leaves)
    for stage, source, place in _parameters(stages):
        if source.name in values:
            changed[place] = [_put_on_devices(stage, source, values[source.name])]
    return tuple(changed)


def _parameters(
    stages: Sequence[PipelineStage],
) -> Iterator[tuple[PipelineStage, ParameterSource, slice]]:
    """The parameters of this process's stages, and their leaves' places among all."""
    for stage in stages:
        begin, model = stage.leaves.start, stage.model
        for source, parameter in zip(model.sources, model.model.parameters, strict=True):
            end = begin + len(jax.tree.leaves(parameter))
            if stage.device_group.local:
                yield stage, source, slice(begin, end)
            begin = end


def local_rows(users: Sequence[tuple[PipelineStage, ParameterSource]]) -> range | None:
    """The rows of a parameter that this process's devices need; None: all.

    Args:
        users: each stage that has the parameter, and its entry there.
    """
    begins, ends, total = list[int](), list[int](), 0
    for stage, source in users:
        share = source.shardings.get(len(source.shape) - 2)
        if share is None or len(source.shape) < 2:
            return None
        total = share.total
        own = [device for device in stage.device_group.local if share.counts[device]]
        begins += [share.starts[device] for device in own]
        ends += [share.starts[device] + share.counts[device] for device in own]
    if not begins or max(ends) - min(begins) == total:
        return None
    return range(min(begins), max(ends))


def _put_on_devices(stage: PipelineStage, source: ParameterSource, values: Any) -> Any:
    """A stage's parameter, sharded over the stage's devices."""
    group, shares = stage.device_group, source.shardings
    if isinstance(values, RowSlice):
        axis = len(source.shape) - 2
        share, begin = shares[axis], values.begin
        starts = tuple(start - begin for start in share.starts)
        shares, values = {**shares, axis: replace(share, starts=starts)}, values.values
    with target_platform(group.platform):
        values = packed_for_target(values)
    shards = [slice_shard(values, shares, device) for device in group.local]
    if source.first_only:  # a term added to partial sums before an all-reduce
        shards = [
            shard if device == 0 else np.zeros_like(shard)
            for device, shard in zip(group.local, shards, strict=True)
        ]
    memory = HOST_MEMORY if stage.streamed else None
    return jax.tree.map(lambda *each: group.join_shards(each, source.axis, memory), *shards)

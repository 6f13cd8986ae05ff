"""Sharded loading: each device gets its shard of a parameter as soon as the parameter is read."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import Array

from jinfer.engine.scheduling.cache_size import trim
from jinfer.loader.weights.load_weights import load
from jinfer.loader.weights.plan_weights import WeightPlan
from jinfer.loader.weights.read_parameter import RowSlice
from jinfer.ops.attention.kv_cache import nbytes
from jinfer.ops.backend import target_platform
from jinfer.parallel.device_groups import HOST_MEMORY
from jinfer.parallel.pipeline_stage import PipelineStage
from jinfer.parallel.shard_params import packed_for_target, slice_shard
from jinfer.parallel.stage_model import ParameterSource

_TRIM_BYTES = 32 << 20  # freed bytes after which the allocator returns memory to the system


def load_stages(
    plan: WeightPlan, stages: Sequence[PipelineStage], *, progress: bool = False
) -> tuple[Array, ...]:
    """The sharded parameters of all stages, in the order of the stages.

    Host memory holds only the parameters that are being read, one per reader thread. Nothing is
    read for stages of other processes; abstract arrays stand for their parameters.
    """
    wanted: dict[str, list[tuple[int, int]]] = {}
    local_stages = [
        (number, stage) for number, stage in enumerate(stages) if stage.device_group.local
    ]
    for number, stage in local_stages:
        for index, source in enumerate(stage.model.sources):
            wanted.setdefault(source.name, []).append((number, index))
    loaded: dict[tuple[int, int], Any] = {}
    freed = 0

    def put(names: Sequence[str], values: Any) -> None:
        nonlocal freed
        shards: dict[Any, Any] = {}
        for name in names:
            for number, index in wanted.get(name, ()):
                source = stages[number].model.sources[index]
                key = number, _sharding_key(source.shardings), source.first_only
                if key not in shards:
                    shards[key] = _put_on_devices(stages[number], source, values)
                loaded[number, index] = shards[key]
        jax.block_until_ready(shards)
        freed += nbytes(values.values if isinstance(values, RowSlice) else values)
        if freed > _TRIM_BYTES:  # threads may race on the count; the trim then comes a little later
            freed = 0
            trim()

    rows = {
        name: local_rows([(stages[n], stages[n].model.sources[i]) for n, i in users])
        for name, users in wanted.items()
        if name in plan.plain.names
    }
    load(plan, put, rows, progress=progress)
    for name in wanted.keys() - set(plan.plain.names):  # adapters, of which none is loaded yet
        number, index = wanted[name][0]
        dtype = stages[number].model.model.parameters[index].dtype
        put([name], np.zeros(stages[number].model.sources[index].shape, dtype))
    gc.collect(0)  # releases the whole arrays that JAX still refers to
    trim()
    absent = [stage.device_group.abstract_shards(stage.model.model.parameters) for stage in stages]
    return tuple(
        leaf
        for number, stage in enumerate(stages)
        for index in range(len(stage.model.sources))
        for leaf in jax.tree.leaves(loaded.get((number, index), absent[number][index]))
    )


def replaced_leaves(
    stages: Sequence[PipelineStage], leaves: Sequence[Array], values: Mapping[str, np.ndarray]
) -> tuple[Array, ...]:
    """The leaves of all stages with other values of some parameters, none of them quantized.

    Args:
        leaves: as of `load_stages`.
        values: name of each parameter in the whole model -> its values.
    """
    changed, at = list(leaves), 0
    for stage in stages:
        for source, parameter in zip(
            stage.model.sources, stage.model.model.parameters, strict=True
        ):
            if source.name in values and stage.device_group.local:
                changed[at] = _put_on_devices(stage, source, values[source.name])
            at += len(jax.tree.leaves(parameter))
    return tuple(changed)


def _sharding_key(shares: Mapping[int, Any]) -> Any:
    return tuple(sorted(shares.items()))


def local_rows(wanted: Sequence[tuple[PipelineStage, ParameterSource]]) -> range | None:
    """The rows of a parameter that this process's devices need; None: all.

    Args:
        wanted: each stage that has the parameter, and its entry there.
    """
    begin, end, total = [], [], 0
    for stage, source in wanted:
        share = source.shardings.get(len(source.shape) - 2)
        if share is None or len(source.shape) < 2:
            return None
        total = share.total
        for device in stage.device_group.local:
            if share.counts[device]:
                begin.append(share.starts[device])
                end.append(share.starts[device] + share.counts[device])
    if not begin or max(end) - min(begin) == total:
        return None
    return range(min(begin), max(end))


def _put_on_devices(stage: PipelineStage, source: ParameterSource, values: Any) -> Any:
    """A stage's parameter, sharded over the stage's devices."""
    device_group, shares = stage.device_group, source.shardings
    if isinstance(values, RowSlice):
        axis = len(source.shape) - 2
        share, begin = shares[axis], values.begin
        starts = tuple(start - begin for start in share.starts)
        shares, values = {**shares, axis: replace(share, starts=starts)}, values.values
    with target_platform(device_group.platform):
        values = packed_for_target(values)
    shards = [slice_shard(values, shares, device) for device in device_group.local]
    if source.first_only:  # a term added to partial sums before an all-reduce
        shards = [
            shard if device == 0 else np.zeros_like(shard)
            for device, shard in zip(device_group.local, shards, strict=True)
        ]
    memory = HOST_MEMORY if stage.streamed else None
    return jax.tree.map(lambda *leaves: device_group.join_shards(leaves, memory), *shards)

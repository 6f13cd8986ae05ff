"""Builds a rank's programs of a distributed model; all ranks agree on plan and cache size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from jinfer.distributed.consistency_check import check_consistency
from jinfer.distributed.distributed_pipeline import DistributedPipeline
from jinfer.distributed.process_group import ProcessGroup
from jinfer.distributed.unsupported import check_spec, check_stages
from jinfer.engine.runner.compiled_programs import CompiledPrograms
from jinfer.engine.runner.step_key import Sizes
from jinfer.engine.scheduling.cache_size import cache_blocks, fewest_blocks, free_memory
from jinfer.loader.open_model import Opened
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.attention.kv_cache import nbytes
from jinfer.parallel.microbatches import MicroBatches
from jinfer.parallel.placement import ModelToPlace, make_stages, partition_plan
from jinfer.parallel.stage_model import PipelineStage


def build_distributed_programs(
    group: ProcessGroup,
    model: AbstractModel,
    opened: Opened,
    sizes: Callable[[dict[str, int]], Sizes],
) -> CompiledPrograms:
    """This rank's programs; on rank 0 an engine calls them.

    Args:
        sizes: makes the sizes that all programs share from the KV cache blocks of each group.

    Raises:
        SpecError: `[partition]` asks for what is not possible.
        SourceError: another rank has opened something else.
    """
    check_spec(group, opened)
    check_consistency(group, opened)
    dtype = jnp.dtype(opened.dtype)
    whole = ModelToPlace(opened.spec, model, opened.context, dtype, opened.kv_cache)
    whole = _with_devices(group, whole)
    plan = partition_plan(whole)
    stages = make_stages(plan, whole)
    check_stages(group, stages, opened.spec.path)
    local_blocks = _local_cache_blocks(
        [stage for stage in stages if stage.device_group.local], opened
    )
    shared = sizes(fewest_blocks(group.gather(local_blocks)))
    lanes = MicroBatches(plan.lanes, opened.spec.engine.slots)
    pipeline = DistributedPipeline(
        group=group, model=model, sizes=shared, stages=stages, lanes=lanes
    )
    return CompiledPrograms(model, shared, pipeline=pipeline)


def _local_cache_blocks(stages: Sequence[PipelineStage], opened: Opened) -> dict[str, int]:
    """The KV cache blocks of each group that every stage of this rank has room for."""
    counts = list[dict[str, int]]()
    hosts = sum(d.platform == "cpu" for stage in stages for d in stage.device_group.devices)
    for stage in stages:
        device, model = stage.device_group.devices[0], stage.model.model
        free = free_memory(device) // (hosts if device.platform == "cpu" else 1)
        sizes = opened.kv_cache, opened.spec.engine, opened.context
        used = nbytes(model.parameters)
        counts.append(cache_blocks(model.caches, *sizes, used=used, free=free))
    return fewest_blocks(counts)


def _with_devices(group: ProcessGroup, whole: ModelToPlace) -> ModelToPlace:
    """The model with the devices that rank 0 chooses for "auto", by its free memory."""
    named = whole.spec.partition.devices
    if named is None or named.strip() != "auto":
        return whole
    if group.rank == 0:
        named = ";".join("&".join(stage.devices) for stage in partition_plan(whole).stages)
    return whole.with_partition(devices=group.broadcast(named))

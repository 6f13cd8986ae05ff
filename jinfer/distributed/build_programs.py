"""Builds a rank's programs of a distributed model; all ranks agree on plan and cache size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax.numpy as jnp

from jinfer.distributed.consistency_check import check_consistency
from jinfer.distributed.coordinator import CoordinatorPrograms
from jinfer.distributed.distributed_programs import DistributedPrograms
from jinfer.distributed.process_group import ProcessGroup
from jinfer.distributed.unsupported import check_spec, check_stages
from jinfer.engine.runner.step_key import Sizes
from jinfer.engine.scheduling.cache_size import cache_blocks, free_memory
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.abstract_model import AbstractModel
from jinfer.opening.open_model import Opened
from jinfer.parallel.layer_bytes import nbytes
from jinfer.parallel.microbatches import MicroBatches
from jinfer.parallel.pipeline_stage import PipelineStage
from jinfer.parallel.placement import make_stages, partition_plan


def build_distributed_programs(
    group: ProcessGroup,
    model: AbstractModel,
    opened: Opened,
    sizes: Callable[[dict[str, int]], Sizes],
) -> DistributedPrograms:
    """This rank's programs; on rank 0 the coordinator's, which an engine calls.

    Args:
        sizes: makes the sizes that all programs share from the KV cache blocks of each group.

    Raises:
        SpecError: `[partition]` asks for what is not possible.
        SourceError: another rank has opened something else.
    """
    check_spec(group, opened)
    check_consistency(group, opened)
    dtype = jnp.dtype(opened.dtype)
    spec = _with_devices(group, model, opened)
    plan = partition_plan(spec, model, opened.context, dtype, opened.kv_cache)
    stages = make_stages(plan, spec, model, dtype)
    check_stages(group, stages, spec.path)
    local_blocks = _local_cache_blocks(
        [stage for stage in stages if stage.device_group.local], opened
    )
    programs = CoordinatorPrograms if group.rank == 0 else DistributedPrograms
    return programs(
        group=group,
        model=model,
        sizes=sizes(_common_cache_blocks(group, local_blocks)),
        stages=stages,
        lanes=MicroBatches(plan.lanes, spec.engine.slots),
    )


def _local_cache_blocks(stages: Sequence[PipelineStage], opened: Opened) -> dict[str, int]:
    """The KV cache blocks of each group that every stage of this rank has room for."""
    blocks: dict[str, int] = {}
    engine = opened.spec.engine
    hosts = sum(d.platform == "cpu" for stage in stages for d in stage.device_group.devices)
    for stage in stages:
        device, model = stage.device_group.devices[0], stage.model.model
        counts = cache_blocks(
            model.caches,
            opened.kv_cache,
            slots=engine.slots,
            context=opened.context,
            chunk=engine.prefill_chunk,
            tokens=engine.kv_tokens,
            used=nbytes(model.parameters),
            free=free_memory(device) // (hosts if device.platform == "cpu" else 1),
        )
        for group, count in counts.items():
            blocks[group] = min(count, blocks.get(group, count))
    return blocks


def _with_devices(group: ProcessGroup, model: AbstractModel, opened: Opened) -> ModelSpec:
    """The specification with the devices that rank 0 chooses for "auto", by its free memory."""
    spec = opened.spec
    dtype, named = jnp.dtype(opened.dtype), spec.partition.devices
    if named is None or named.strip() != "auto":
        return spec
    if group.rank == 0:
        plan = partition_plan(spec, model, opened.context, dtype, opened.kv_cache)
        named = ";".join("&".join(stage.devices) for stage in plan.stages)
    return replace(spec, partition=replace(spec.partition, devices=group.broadcast(named)))


def _common_cache_blocks(group: ProcessGroup, local_blocks: dict[str, int]) -> dict[str, int]:
    """The blocks of each group that every rank has room for: all share the block tables."""
    least: dict[str, int] = {}
    for blocks in group.gather(local_blocks):
        for name, count in blocks.items():
            least[name] = min(count, least.get(name, count))
    return dict(group.broadcast(least))

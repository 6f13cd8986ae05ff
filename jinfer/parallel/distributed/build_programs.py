"""Builds a rank's programs of a distributed model; all ranks agree on plan and cache size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from jinfer.engine.runner.compiled_programs import CompiledPrograms
from jinfer.engine.runner.step_key import Sizes
from jinfer.engine.scheduling.cache_size import cache_blocks, fewest_blocks, free_memory
from jinfer.loader.open_model import Opened
from jinfer.modelspec.partition_table import AUTO, CPU, device_groups
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.attention.kv_cache import nbytes
from jinfer.parallel.distributed.consistency_check import check_consistency
from jinfer.parallel.distributed.distributed_pipeline import DistributedPipeline
from jinfer.parallel.distributed.process_group import ProcessGroup
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


def check_spec(group: ProcessGroup, opened: Opened) -> None:
    """Raises `SpecError` where a specification asks for what several processes do not support."""
    spec, several = opened.spec, f"with {group.size} processes"
    part, path = spec.partition, spec.path
    if part.is_plain:
        reason = f'says nothing, but there are {group.size} processes; set it, "{AUTO}" will do'
        raise SpecError(path, "partition.devices", reason)
    if spec.speculation.draft:
        raise SpecError(path, "speculation.draft", f"cannot be had {several}; leave it out")
    for key, asked in (
        ("cache_ram", spec.engine.cache_ram > 0),
        ("cache_disk", spec.engine.cache_disk is not None),
    ):
        if asked:
            reason = f"cannot be had {several}, each of which has a part of the cache; leave it out"
            raise SpecError(path, f"engine.{key}", reason)
    if spec.quantization.method == "gptq":
        reason = f"cannot be had {several}; convert the checkpoint before: jinfer quantize"
        raise SpecError(path, "quantization.method", reason)
    hosted = part.devices is not None and (CPU,) in device_groups(part.devices, path)
    for key, asked, what in (
        ("devices", hosted, "a stage on the host "),
        ("cpu_layers", part.cpu_layers > 0, "a stage on the host "),
        ("host_embeddings", part.host_embeddings, "a stage on the host "),
        ("host_kv_cache", part.host_kv_cache > 0, ""),
        ("streamed_layers", part.streamed_layers > 0, ""),
    ):
        if asked:
            raise SpecError(
                path, f"partition.{key}", f"{what}cannot be had {several}; leave it out"
            )


def check_stages(group: ProcessGroup, stages: tuple[PipelineStage, ...], path: object) -> None:
    """Raises `SpecError` where a rank has no device, or a stage's collectives are not possible."""
    owners = {device.process_index for stage in stages for device in stage.device_group.devices}
    if idle := sorted(set(range(group.size)) - owners):
        raise SpecError(
            path,
            "partition",
            f"leaves process {idle[0]} of {group.size} without a device; devices are numbered "
            "through all processes, those of process 0 first",
        )
    shared = any(
        len({device.process_index for device in stage.device_group.devices}) > 1
        and stage.device_group.devices[0].platform == CPU
        for stage in stages
    )
    if shared and group.no_collectives:
        raise SpecError(
            path, "partition.devices", f"divides a stage among hosts, and {group.no_collectives}"
        )

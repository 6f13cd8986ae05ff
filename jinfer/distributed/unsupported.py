"""Checks for what a distributed job does not support; errors say what to do instead."""

from __future__ import annotations

from jinfer.distributed.process_group import ProcessGroup
from jinfer.loader.open_model import Opened
from jinfer.modelspec.partition_table import AUTO, CPU, device_groups
from jinfer.modelspec.spec_errors import SpecError
from jinfer.parallel.stage_model import PipelineStage


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

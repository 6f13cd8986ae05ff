"""Placement: resolves `[partition]` to pipeline stages on JAX devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jinfer.engine.scheduling.cache_size import block_bytes, free_memory, host_memory
from jinfer.modelspec.block import CachedKV
from jinfer.modelspec.feed_forward_blocks import MoESpec
from jinfer.modelspec.layer_spec import shared_keys
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.partition_table import CPU
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.attention.kv_cache import BLOCK, ENCODER, CacheShape, nbytes
from jinfer.ops.backend import target_platform
from jinfer.parallel.cost_model import HARDWARE, HOST_HARDWARE, Hardware, ModelCost, best_layout
from jinfer.parallel.device_groups import DeviceGroup
from jinfer.parallel.layer_plan import (
    ModelBytes,
    ModelSlice,
    PartitionPlan,
    PlannedStage,
    StageDeviceNames,
    make_partition_plan,
    model_bytes,
    split_stage,
    spread_evenly,
    whole_model,
)
from jinfer.parallel.sharding_rules import ShardingError
from jinfer.parallel.stage_model import PipelineStage, StageModel, make_stage_model
from jinfer.quant_format import Kind

_ANY_DEVICE_COUNT = 100_000


@dataclass(frozen=True)
class ModelToPlace:
    """A model whose place on devices is planned.

    Attributes:
        model: the model, with its parameters as they will be stored.
        context: tokens of a sequence in the KV cache.
        dtype: dtype of the computation.
        kind: dtype of the KV cache.
    """

    spec: ModelSpec
    model: AbstractModel
    context: int
    dtype: DTypeLike
    kind: Kind

    @cached_property
    def weights(self) -> ModelBytes:
        """Bytes of its weights."""
        return model_bytes(self.spec, self.model)

    def with_partition(self, **keys: Any) -> ModelToPlace:
        """The same with other keys of `[partition]`."""
        partition = replace(self.spec.partition, **keys)
        return replace(self, spec=replace(self.spec, partition=partition))


def partition_plan(whole: ModelToPlace, *, dry_run: bool = False) -> PartitionPlan:
    """The plan that a specification asks for, on the devices of this machine or job.

    Args:
        dry_run: whether to accept device numbers that do not exist, for a dry run.

    Raises:
        SpecError: the plan is not possible.
    """
    spec, count = whole.spec, _ANY_DEVICE_COUNT if dry_run else len(jax.devices())
    slots, automatic = spec.engine.slots, partial(_best_groups, whole)
    return make_partition_plan(spec.partition, whole.weights, count, slots, spec.path, automatic)


def _best_groups(whole: ModelToPlace) -> StageDeviceNames:
    """`devices = "auto"`: the device groups of the layout that the cost model finds fastest."""
    machine, work = hardware_of(jax.devices()), model_cost(whole)
    count = len(jax.devices())
    # Every process of a job needs at least one device of the plan.
    last = max(device.process_index for device in jax.devices())
    least = next(n for n, device in enumerate(jax.devices(), 1) if device.process_index == last)
    possible = [
        (pipe, tensor)
        for pipe, tensor in product(range(1, count + 1), repeat=2)
        if least <= pipe * tensor <= count and pipe <= work.layers and _can_shard(whole, tensor)
    ]
    layout = best_layout(work, machine, possible, context=whole.context)
    if layout is None:
        raise SpecError(
            whole.spec.path,
            "partition.devices",
            f"weights of {work.weights / 2**30:.1f} GiB and a cache for {whole.context} tokens fit "
            f"on no division of {count} devices of {machine.memory / 2**30:.1f} GiB; quantize to "
            "fewer bits, set engine.context, or take more devices",
        )
    return tuple(
        tuple(str(stage * layout.tensor + i) for i in range(layout.tensor))
        for stage in range(layout.pipe)
    )


def _can_shard(whole: ModelToPlace, tensor: int) -> bool:
    try:
        make_stage_model(whole.spec, whole.model, whole_model(whole.spec), tensor, whole.dtype)
    except ShardingError:
        return False
    return True


def hardware_of(devices: Sequence[jax.Device]) -> Hardware:
    """The table's hardware of these devices (an unknown GPU's is the A100's), and free memory."""
    # Memory of other processes' devices is not known here; assume it is the same.
    local = [device for device in devices if device.process_index == jax.process_index()]
    on_cpu, kind = local[0].platform == CPU, local[0].device_kind.lower().replace(" ", "")
    free = min(map(free_memory, local))
    if on_cpu:
        return replace(HOST_HARDWARE, memory=free / len(local))
    known = next((name for name in HARDWARE if name in kind), "a100")
    return replace(HARDWARE[known], memory=free)


def model_cost(whole: ModelToPlace) -> ModelCost:
    """What the cost model needs to know of a model: its bytes, layers and widths."""
    spec, model = whole.spec, whole.model
    caches = {name: shape for name, shape in model.caches.items() if shape.group != ENCODER}
    cache = sum(block_bytes(caches, whole.kind).values()) / BLOCK if caches else 0.0
    # With tied embeddings the table is also multiplied with, as the head.
    tables = {"table"} if "head" in model.roles else set()
    active = parameters = looked_up = 0.0
    for name, parameter, role in zip(model.names, model.parameters, model.roles, strict=True):
        if role in tables:
            looked_up += nbytes(parameter)
            continue
        share = _fraction_read(spec, name)
        active += share * nbytes(parameter)
        parameters += share * prod(parameter.shape)
    return ModelCost(
        weights=whole.weights.total,
        active=active,
        parameters=parameters,
        layers=max(map(len, whole.weights.layers.values())),
        hidden=spec.dims.get("hidden", 0) * jnp.dtype(whole.dtype).itemsize,
        cache=cache,
        kv_heads=min(
            (shape.heads for shape in caches.values() if isinstance(shape, CacheShape)), default=1
        ),
        tables=looked_up,
    )


def _fraction_read(spec: ModelSpec, name: str) -> float:
    """The fraction of a parameter that one token reads: top_k / experts for experts, else 1."""
    stack_name, number, *rest = (*name.split("."), "", "")
    stack = next((stack for stack in spec.stacks if stack.name == stack_name), None)
    if stack is None or not number.isdigit() or "experts" not in rest:
        return 1.0
    block = dict(stack.layers[int(number)].modules).get(rest[0])
    return block.top_k / block.experts if isinstance(block, MoESpec) else 1.0


def stage_devices(plan: PartitionPlan, path: object) -> tuple[tuple[jax.Device, ...], ...]:
    """The JAX devices of each stage.

    Raises:
        SpecError: a stage is on the host, and JAX's CPU platform is not enabled.
    """
    devices = jax.devices()
    on_host = any(CPU in stage.devices for stage in plan.stages)
    host = host_device(plan, path) if on_host else devices[0]
    return tuple(
        tuple(host if name == CPU else devices[int(name)] for name in stage.devices)
        for stage in plan.stages
    )


def host_device(plan: PartitionPlan, path: object) -> jax.Device:
    """The CPU device that is used as the host. Raises `SpecError` as `stage_devices`."""
    named = {name for stage in plan.stages for name in stage.devices} - {CPU}
    used = {jax.devices()[int(name)] for name in named}
    try:
        hosts = jax.devices(CPU)
    except RuntimeError:
        reason = "a stage on the host needs JAX to know the CPU, as JAX_PLATFORMS=cuda,cpu says"
        raise SpecError(path, "partition", reason) from None
    # On a CPU-only machine with several virtual devices, prefer an unused device.
    return next((device for device in hosts if device not in used), hosts[0])


def stage_models(plan: PartitionPlan, whole: ModelToPlace) -> list[StageModel]:
    """The stages' models. Raises `SpecError` where a stage cannot be divided among its devices."""
    try:
        return [_stage_model(whole, stage, stage.slice) for stage in plan.stages]
    except ShardingError as error:
        spec = whole.spec
        key = "mesh" if spec.partition.mesh is not None else "devices"
        raise SpecError(spec.path, f"partition.{key}", str(error)) from None


def _stage_model(whole: ModelToPlace, row: PlannedStage, part: ModelSlice) -> StageModel:
    """A stage's model, with quantized matrices packed for the stage's kind of device."""
    with target_platform(CPU) if CPU in row.devices else nullcontext():
        return make_stage_model(whole.spec, whole.model, part, len(row.devices), whole.dtype)


def make_stages(plan: PartitionPlan, whole: ModelToPlace) -> tuple[PipelineStage, ...]:
    """The pipeline's stages on their devices, in order. Raises `SpecError` as `stage_devices`."""
    stages, begin, host, spec = list[PipelineStage](), 0, None, whole.spec
    if spec.partition.host_kv_cache:
        host = DeviceGroup((host_device(plan, spec.path),))
    main, streamed, cached = main_stack(spec), streamed_layers(plan, spec), _caching_layers(spec)
    for planned, devices in zip(plan.stages, stage_devices(plan, spec.path), strict=True):
        hosted = cached if host is not None and CPU not in planned.devices else frozenset[int]()
        for substage in split_stage(planned.slice, main, streamed, hosted):
            try:
                local = _stage_model(whole, planned, substage.slice)
            except ShardingError as error:  # between layers: that between devices is made before
                raise SpecError(spec.path, "partition.streamed_layers", str(error)) from None
            leaves = slice(begin, begin + len(jax.tree.leaves(local.model.parameters)))
            where = substage.streamed, host if substage.hosted else None
            stages.append(PipelineStage(local, DeviceGroup(devices), leaves, *where))
            begin = leaves.stop
    return tuple(stages)


def streamed_layers(plan: PartitionPlan, spec: ModelSpec) -> frozenset[int]:
    """Weight offload: the layers whose weights stay in host memory.

    Raises:
        SpecError: `partition.streamed_layers` is more than the layers on devices.
    """
    count, main = spec.partition.streamed_layers, main_stack(spec)
    stages = (stage for stage in plan.stages if CPU not in stage.devices)
    on_devices = [layer for stage in stages for layer in stage.slice.layers[main]]
    if count > len(on_devices):
        most = len(on_devices)
        reason = f"{count} are more than the {most} layers on devices; take at most these"
        raise SpecError(spec.path, "partition.streamed_layers", reason)
    return spread_evenly(on_devices, count) if count else frozenset()


def main_stack(spec: ModelSpec) -> str:
    """The stack whose layers `[partition]` counts: the decoder if there is one."""
    return "decoder" if spec.decoder is not None else spec.stacks[0].name


def _caching_layers(spec: ModelSpec) -> frozenset[int]:
    """The decoder's layers that cache keys and values."""
    layers = spec.decoder.layers if spec.decoder is not None else ()
    return frozenset(
        number
        for number, layer in enumerate(layers)
        if any(isinstance(block.cached(), CachedKV) for _, block in layer.modules)
    )


def host_cache_refusal(plan: PartitionPlan, spec: ModelSpec) -> str:
    """Why KV cache offload (`host_kv_cache`) is not possible; "": it is."""
    layers = spec.decoder.layers if spec.decoder is not None else ()
    cached = [block.cached() for layer in layers for _, block in layer.modules]
    indexed = any(isinstance(own, CachedKV) and own.index_width for own in cached)
    stages = [stage.devices for stage in plan.stages]
    for refused, reason in (
        (spec.decoder is None, "an encoder keeps no cache; leave it out"),
        (
            not _caching_layers(spec),
            "no layer has keys and values, and states stay on their device; leave it out",
        ),
        (shared_keys(layers), "layers that share keys need these on one device; leave it out"),
        (indexed, "an indexer chooses among all keys, which are on its device; leave it out"),
        (
            all(CPU in devices for devices in stages),
            "all stages are on the host, and so is all of the cache; leave it out",
        ),
        (
            any(len(devices) > 1 for devices in stages),
            "a stage of several devices has its cache on them; take stages of one device",
        ),
        (
            spec.speculation.draft,
            "drafts are not verified with that; leave out it, or speculation.draft",
        ),
    ):
        if refused:
            return reason
    return ""


def free_memory_of(plan: PartitionPlan, spec: ModelSpec) -> Callable[[str], float]:
    """A function from a memory's name, a device of the plan or `HOST`, to its free bytes."""
    names = [name for stage in plan.stages for name in stage.devices]
    devices = [device for group in stage_devices(plan, spec.path) for device in group]
    by_name = dict(zip(names, devices, strict=True))
    # CPU devices share the host's memory with each other and with what is offloaded to it.
    hosts = {device for device in by_name.values() if device.platform == CPU}
    free = {name: free_memory(device) for name, device in by_name.items() if device not in hosts}
    count = len(hosts) + (spec.partition.host_kv_cache > 0 or spec.partition.streamed_layers > 0)
    host_share = host_memory() / max(1, count)
    return lambda name: free.get(name, host_share)

"""From `[partition]` to stages on devices, and what of the cache they have room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from math import prod

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jinfer.engine.scheduling.cache_size import block_bytes, free_memory, host_memory
from jinfer.modelspec.blocks import MixtureOfExperts
from jinfer.modelspec.cache_dtype import Kind
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.partition_table import CPU
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.attention.kv_cache import BLOCK, ENCODER
from jinfer.ops.backend import target
from jinfer.parallel.cost_model import Link, Machine, Work, best
from jinfer.parallel.device_groups import Site
from jinfer.parallel.layer_bytes import nbytes, weigh
from jinfer.parallel.layer_plan import Groups, Plan, Row, Weight, make_plan
from jinfer.parallel.shard_sizes import ShareError
from jinfer.parallel.sharding_rules import Part, whole_of
from jinfer.parallel.stage import StageModel, stage_model
from jinfer.parallel.stage_programs import Stage
from jinfer.parallel.substages import pieces, spread

# What is taken for granted of devices that say nothing of themselves: the order of today's.
_GPU = Machine(0, 1.5e12, 2e14, Link(1e11, 1e-5), Link(1e11, 1e-5), 2e-4)
_MANY = 100_000
HOST_MACHINE = Machine(0, 2e10, 2e11, Link(1e10, 5e-5), Link(1e10, 5e-5), 3e-4)


def plan_of(
    spec: ModelSpec,
    model: AbstractModel,
    context: int,
    dtype: DTypeLike,
    kind: Kind,
    *,
    imagined: bool = False,
) -> Plan:
    """The plan that a specification asks for, on the devices that there are.

    Args:
        model: with its parameters as they will be stored.
        context, kind: of the cache.
        imagined: whether all devices that it names count as if they were there.

    Raises:
        SpecError: it cannot be.
    """
    weight, count = weigh(spec, model), _MANY if imagined else len(jax.devices())

    def automatic() -> Groups:
        return _automatic(spec, model, weight, context, dtype, kind)

    return make_plan(spec.partition, weight, count, spec.engine.slots, spec.path, automatic)


def _automatic(
    spec: ModelSpec,
    model: AbstractModel,
    weight: Weight,
    context: int,
    dtype: DTypeLike,
    kind: Kind,
) -> Groups:
    """The devices of each stage, as the cost model finds them best."""
    machine, work = machine_of(jax.devices()), work_of(spec, model, weight, dtype, kind)
    count = len(jax.devices())
    # Each process of a job has to have something to do.
    last = max(device.process_index for device in jax.devices())
    least = next(n for n, device in enumerate(jax.devices(), 1) if device.process_index == last)
    possible = [
        (pipe, tensor)
        for pipe, tensor in product(range(1, count + 1), repeat=2)
        if least <= pipe * tensor <= count
        and pipe <= work.layers
        and _divides(spec, model, tensor, dtype)
    ]
    found = best(work, machine, possible, context=context)
    if found is None:
        raise SpecError(
            spec.path,
            "partition.devices",
            f"weights of {weight.total / 2**30:.1f} GiB and a cache for {context} tokens fit on no "
            f"division of {count} devices of {machine.memory / 2**30:.1f} GiB; quantize to fewer "
            "bits, set engine.context, or take more devices",
        )
    return tuple(
        tuple(str(row * found.tensor + i) for i in range(found.tensor)) for row in range(found.pipe)
    )


def _divides(spec: ModelSpec, model: AbstractModel, tensor: int, dtype: DTypeLike) -> bool:
    try:
        stage_model(spec, model, whole_of(spec), tensor, dtype)
    except ShareError:
        return False
    return True


def machine_of(devices: Sequence[jax.Device]) -> Machine:
    """What these devices are taken to be."""
    # Of those of other processes nobody here knows: they are taken to be like these.
    own = [device for device in devices if device.process_index == jax.process_index()]
    if own[0].platform == "cpu":
        return replace(HOST_MACHINE, memory=free_memory(own[0]) / len(own))
    return replace(_GPU, memory=min(map(free_memory, own)))


def work_of(
    spec: ModelSpec, model: AbstractModel, weight: Weight, dtype: DTypeLike, kind: Kind
) -> Work:
    """What a model asks for."""
    layers = max(map(len, weight.layers.values()))
    own = {name: shape for name, shape in model.caches.items() if shape.group != ENCODER}
    cache = sum(block_bytes(own, kind).values()) / BLOCK if own else 0.0
    width = jnp.dtype(dtype).itemsize
    # Where there is no head of its own, the table of embeddings is that.
    tables = {"table"} if "head" in model.roles else set()
    active = parameters = looked_up = 0.0
    for name, parameter, role in zip(model.names, model.parameters, model.roles, strict=True):
        if role in tables:
            looked_up += nbytes(parameter)
            continue
        share = _share_read(spec, name)
        active += share * nbytes(parameter)
        parameters += share * prod(parameter.shape)
    return Work(
        weights=weight.total,
        active=active,
        parameters=parameters,
        layers=layers,
        hidden=spec.dims.get("hidden", 0) * width,
        vocab=4.0 * model.vocab,
        cache=cache,
        kv_heads=min((shape.heads for shape in own.values()), default=1),
        tables=looked_up,
    )


def _share_read(spec: ModelSpec, name: str) -> float:
    """The share of a parameter that one token is multiplied with: of experts, the chosen ones."""
    stack, number, *rest = (*name.split("."), "", "")
    found = next((own for own in spec.stacks if own.name == stack), None)
    if found is None or not number.isdigit() or "experts" not in rest:
        return 1.0
    block = dict(found.layers[int(number)].modules).get(rest[0])
    return block.top_k / block.experts if isinstance(block, MixtureOfExperts) else 1.0


def devices_of(plan: Plan, path: object) -> tuple[tuple[jax.Device, ...], ...]:
    """The devices of each stage. Raises `SpecError` where JAX was told to know no CPU."""
    there = jax.devices()
    on_host = any(CPU in row.devices for row in plan.rows)
    host = host_device(plan, path) if on_host else there[0]
    return tuple(
        tuple(host if name == CPU else there[int(name)] for name in row.devices)
        for row in plan.rows
    )


def host_device(plan: Plan, path: object) -> jax.Device:
    """The host's device. Raises `SpecError`, as above."""
    named = {name for row in plan.rows for name in row.devices} - {CPU}
    used = {jax.devices()[int(name)] for name in named}
    # Where the host's are all the devices that there are, one that no other stage has.
    free = [device for device in _host(path) if device not in used]
    return free[0] if free else _host(path)[0]


def _host(path: object) -> list[jax.Device]:
    try:
        return jax.devices(CPU)
    except RuntimeError:
        reason = "a stage on the host needs JAX to know the CPU, as JAX_PLATFORMS=cuda,cpu says"
        raise SpecError(path, "partition", reason) from None


def stage_models(
    plan: Plan, spec: ModelSpec, model: AbstractModel, dtype: DTypeLike
) -> list[StageModel]:
    """The stages' models. Raises `SpecError` where something cannot be divided."""
    try:
        return [_stage_model(spec, model, row, row.part, dtype) for row in plan.rows]
    except ShareError as error:
        key = "mesh" if spec.partition.mesh is not None else "devices"
        raise SpecError(spec.path, f"partition.{key}", str(error)) from None


def _stage_model(
    spec: ModelSpec, model: AbstractModel, row: Row, part: Part, dtype: DTypeLike
) -> StageModel:
    """A stage's model, its quantized matrices packed for the kind of device that it is on."""
    with target(CPU) if CPU in row.devices else nullcontext():
        return stage_model(spec, model, part, len(row.devices), dtype)


def make_stages(
    plan: Plan, spec: ModelSpec, model: AbstractModel, dtype: DTypeLike
) -> tuple[Stage, ...]:
    """The stages on their devices. Raises `SpecError`, as above."""
    stages, begin, host = list[Stage](), 0, None
    if spec.partition.host_kv_cache:
        host = Site((host_device(plan, spec.path),))
    main, streamed = main_stack(spec), streamed_layers(plan, spec)
    for row, devices in zip(plan.rows, devices_of(plan, spec.path), strict=True):
        hosted = host is not None and CPU not in row.devices
        for piece in pieces(row.part, main, streamed, hosted=hosted):
            own = _stage_model(spec, model, row, piece.part, dtype)
            end = begin + len(jax.tree.leaves(own.model.parameters))
            where = host if piece.hosted else None
            stages.append(Stage(own, Site(devices), slice(begin, end), piece.streamed, where))
            begin = end
    return tuple(stages)


def streamed_layers(plan: Plan, spec: ModelSpec) -> frozenset[int]:
    """Layers whose weights stay in host memory. Raises `SpecError`: there are not so many."""
    count, main = spec.partition.streamed_layers, main_stack(spec)
    there = [i for row in plan.rows if CPU not in row.devices for i in row.part.layers[main]]
    if count > len(there):
        reason = f"{count} are more than the {len(there)} layers on devices; take at most these"
        raise SpecError(spec.path, "partition.streamed_layers", reason)
    return spread(there, count) if count else frozenset()


def main_stack(spec: ModelSpec) -> str:
    """The stack whose layers are divided as `[partition]` says."""
    return "decoder" if spec.decoder is not None else spec.stacks[0].name


def check_host_cache(plan: Plan, spec: ModelSpec) -> None:
    """Raises `SpecError` where a part of the cache cannot be on the host."""
    reason = ""
    if spec.decoder is None:
        reason = "an encoder keeps no cache; leave it out"
    elif all(CPU in row.devices for row in plan.rows):
        reason = "all stages are on the host, and so is all of the cache; leave it out"
    elif any(len(row.devices) > 1 for row in plan.rows):
        reason = "a stage of several devices has its cache on them; take stages of one device"
    elif spec.speculation.draft:
        reason = "drafts are not verified with that; leave out it, or speculation.draft"
    if spec.partition.host_kv_cache and reason:
        raise SpecError(spec.path, "partition.host_kv_cache", reason)


def free_of(plan: Plan, spec: ModelSpec) -> Callable[[str], float]:
    """How many bytes of memory a plan's devices have, and the host."""
    devices = devices_of(plan, spec.path)
    named = {
        name: device
        for row, own in zip(plan.rows, devices, strict=True)
        for name, device in zip(row.devices, own, strict=True)
    }
    # Devices of the host have its memory together, with what it keeps for others.
    hosts = {device for device in named.values() if device.platform == CPU}
    known = {name: free_memory(device) for name, device in named.items() if device not in hosts}
    count = len(hosts) + (spec.partition.host_kv_cache > 0 or spec.partition.streamed_layers > 0)
    machine = host_memory() / max(1, count)
    return lambda name: known.get(name, machine)

"""From `[partition]` to stages on devices, and what of the cache they have room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jinfer.engine.memory import block_bytes, cache_blocks, free_memory
from jinfer.model import AbstractModel
from jinfer.ops.cache import BLOCK, ENCODER
from jinfer.partition.cost import Machine, Work, best
from jinfer.partition.divide import whole_of
from jinfer.partition.making import Stage
from jinfer.partition.plan import Groups, Plan, Weight, make_plan
from jinfer.partition.shares import ShareError
from jinfer.partition.sites import Site
from jinfer.partition.stages import StageModel, stage_model
from jinfer.partition.weighing import nbytes, weigh
from jinfer.quant.kind import Kind
from jinfer.spec.blocks import MixtureOfExperts
from jinfer.spec.errors import SpecError
from jinfer.spec.model import ModelSpec
from jinfer.spec.partition import CPU

# What is taken for granted of devices that say nothing of themselves: the order of today's.
_GPU = Machine(0, 1.5e12, 2e14, 1e11, 1e-5, 2e-4)
_MANY = 100_000
_HOST = Machine(0, 2e10, 2e11, 1e10, 5e-5, 3e-4)


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
        return replace(_HOST, memory=free_memory(own[0]) / len(own))
    return replace(_GPU, memory=min(map(free_memory, own)))


def work_of(
    spec: ModelSpec, model: AbstractModel, weight: Weight, dtype: DTypeLike, kind: Kind
) -> Work:
    """What a model asks for."""
    layers = max(map(len, weight.layers.values()))
    own = {name: shape for name, shape in model.caches.items() if shape.group != ENCODER}
    cache = sum(block_bytes(own, kind).values()) / BLOCK if own else 0.0
    width = jnp.dtype(dtype).itemsize
    count = sum(float(prod(parameter.shape)) for parameter in model.parameters)
    unread = sum(
        nbytes(parameter) * (1 - _share_read(spec, name))
        for name, parameter in zip(model.names, model.parameters, strict=True)
    )
    return Work(
        weights=weight.total,
        active=weight.total - unread,
        parameters=count,
        layers=layers,
        hidden=spec.dims.get("hidden", 0) * width,
        vocab=4.0 * model.vocab,
        cache=cache,
        kv_heads=min((shape.heads for shape in own.values()), default=1),
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
    named = {name for row in plan.rows for name in row.devices}
    host = there[0]
    if CPU in named:
        used = {there[int(name)] for name in named - {CPU}}
        # Where the host's are all the devices that there are, one that no other stage has.
        free = [device for device in _host(path) if device not in used]
        host = free[0] if free else _host(path)[0]
    return tuple(
        tuple(host if name == CPU else there[int(name)] for name in row.devices)
        for row in plan.rows
    )


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
        return [stage_model(spec, model, row.part, len(row.devices), dtype) for row in plan.rows]
    except ShareError as error:
        key = "mesh" if spec.partition.mesh is not None else "devices"
        raise SpecError(spec.path, f"partition.{key}", str(error)) from None


def make_stages(
    plan: Plan, spec: ModelSpec, model: AbstractModel, dtype: DTypeLike
) -> tuple[Stage, ...]:
    """The stages on their devices. Raises `SpecError`, as above."""
    stages, begin = list[Stage](), 0
    for own, devices in zip(
        stage_models(plan, spec, model, dtype), devices_of(plan, spec.path), strict=True
    ):
        end = begin + len(jax.tree.leaves(own.model.parameters))
        stages.append(Stage(own, Site(devices), slice(begin, end)))
        begin = end
    return tuple(stages)


def staged_blocks(
    stages: Sequence[Stage],
    kind: Kind,
    *,
    slots: int,
    context: int,
    chunk: int,
    tokens: int | None,
) -> dict[str, int]:
    """Blocks of each group that every stage has room for: tables are the same for all of them."""
    blocks: dict[str, int] = {}
    hosts = sum(d.platform == "cpu" for stage in stages for d in stage.site.devices)
    for stage in stages:
        device, model = stage.site.devices[0], stage.model.model
        free = free_memory(device) // (hosts if device.platform == "cpu" else 1)
        own = cache_blocks(
            model.caches,
            kind,
            slots=slots,
            context=context,
            chunk=chunk,
            tokens=tokens,
            used=nbytes(model.parameters),
            free=free,
        )
        for group, count in own.items():
            blocks[group] = min(count, blocks.get(group, count))
    return blocks

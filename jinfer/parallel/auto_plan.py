"""`devices = "auto"` where the devices' memory does not suffice: what the host takes over.

Of all that would fit, the least of each kind of change on each division of the devices, the one
whose tokens come soonest by the cost model is taken. Where everything fits nothing changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.typing import DTypeLike

from jinfer.engine.scheduling.cache_size import free_memory, host_memory
from jinfer.modelspec.cache_dtype import Kind
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.partition_table import AUTO, CPU
from jinfer.modelspec.spec_errors import SpecError
from jinfer.nn.abstract_model import AbstractModel
from jinfer.parallel.cost_model import Machine, layouts, with_host
from jinfer.parallel.layer_bytes import weigh
from jinfer.parallel.memory_plan import Sizing, remedies, sizing_of
from jinfer.parallel.placement import HOST_MACHINE, machine_of, plan_of, work_of

_WORDS = {"host_embeddings": "embeddings", "host_kv_cache": "cache", "cpu_layers": "layers"}
_WORDS |= {"streamed_layers": "streamed"}  # as `with_host` calls them
_SHOWN = 4  # of what would fit


@dataclass(frozen=True)
class Option:
    """A way to make a model fit.

    Attributes:
        keys: of `[partition]`.
        step: seconds from a token to the next one, estimated.
    """

    keys: Mapping[str, Any]
    step: float

    def __str__(self) -> str:
        """As it would be written."""
        values = {key: f'"{v}"' if isinstance(v, str) else str(v) for key, v in self.keys.items()}
        return ", ".join(f"{key} = {value.lower()}" for key, value in values.items())


@dataclass(frozen=True)
class _Asked:
    """What is to fit where."""

    spec: ModelSpec
    model: AbstractModel
    context: int
    dtype: DTypeLike
    kind: Kind
    free: Callable[[str], float]

    def sizing(self, keys: Mapping[str, Any]) -> Sizing:
        """Of a specification with these keys. Raises `SpecError` where they cannot be."""
        spec = replace(self.spec, partition=replace(self.spec.partition, **keys))
        plan = plan_of(spec, self.model, self.context, self.dtype, self.kind, imagined=True)
        return sizing_of(plan, spec, self.model, self.dtype, self.kind, self.context, self.free)

    def fits(self, keys: Mapping[str, Any]) -> bool:
        """Whether all memories have room with these keys."""
        try:
            return not self.sizing(keys).asked().problem
        except SpecError:
            return False


def settled(
    spec: ModelSpec, model: AbstractModel, context: int, dtype: DTypeLike, kind: Kind
) -> tuple[ModelSpec, str]:
    """The specification with what "auto" chooses of the host's memory, and why, for people.

    Nothing changes where the devices suffice, where a key of host memory is set, and where the
    devices are the host's own.
    """
    part = spec.partition
    if part.devices is None or part.devices.strip() != AUTO or not has_own_memory(jax.devices()):
        return spec, ""
    if any(getattr(part, key) for key in _WORDS):
        return spec, ""
    free, count = memories(), len(jax.devices())
    if _Asked(spec, model, context, dtype, kind, free).fits({}):
        return spec, ""
    machine = machine_of(jax.devices())
    found = options(spec, model, context, dtype, kind, machine, count, free)
    if not found:
        return spec, ""
    return replace(spec, partition=replace(part, **found[0].keys)), told(found, count)


def has_own_memory(devices: Sequence[jax.Device]) -> bool:
    """Whether devices have a memory that is not the host's."""
    return devices[0].platform != CPU


def memories() -> Callable[[str], float]:
    """Bytes of the memory of each device, by its number, and of the host."""
    own = {str(number): free_memory(device) for number, device in enumerate(jax.devices())}
    host = host_memory()
    return lambda name: own.get(name, host)


def options(
    spec: ModelSpec,
    model: AbstractModel,
    context: int,
    dtype: DTypeLike,
    kind: Kind,
    machine: Machine,
    count: int,
    free: Callable[[str], float],
) -> list[Option]:
    """What would fit on so many devices and the host, the fastest first.

    Args:
        machine: what a device can do.
        free: bytes of the memory of each device, and of the host.
    """
    asked = _Asked(spec, model, context, dtype, kind, free)
    work = work_of(spec, model, weigh(spec, model), dtype, kind)
    found = list[Option]()
    for layout in layouts(count):
        if layout[0] > work.layers:
            continue
        devices = {"devices": _named(layout)}
        for keys in _changes(asked, devices, work.layers):
            use = {_WORDS[key]: value for key, value in keys.items()}
            step = with_host(work, machine, HOST_MACHINE, layout, context=context, **use)
            found.append(Option(devices | dict(keys), step))
    return sorted(found, key=lambda option: (option.step, len(option.keys)))


def _changes(asked: _Asked, devices: Mapping[str, Any], layers: int) -> Iterator[Mapping[str, Any]]:
    """Of each kind of change the least that fits."""
    for start in ({}, {"host_embeddings": True}):
        try:
            sizing = asked.sizing({**devices, **start})
        except SpecError:  # it cannot be divided like that
            continue
        if not sizing.asked().problem:
            yield start
            continue
        for more in remedies(sizing):
            yield {**start, **more}
    fewest = bisect_left(
        range(1, layers), True, key=lambda n: asked.fits({**devices, "cpu_layers": n})
    )
    if fewest < layers - 1:
        yield {"cpu_layers": fewest + 1}


def _named(layout: tuple[int, int]) -> str:
    """The devices of a layout, in the grammar of `partition.devices`."""
    pipe, tensor = layout
    rows = (range(row * tensor, (row + 1) * tensor) for row in range(pipe))
    return ";".join("&".join(map(str, row)) for row in rows)


def told(found: Sequence[Option], count: int) -> str:
    """Why the first option was taken."""
    noun = f"{count} devices" if count > 1 else "one device"
    lines = [f'devices = "{AUTO}": the model alone does not fit on {noun}; what would, estimated:']
    for number, option in enumerate(found[:_SHOWN]):
        taken = ", taken" if number == 0 else ""
        lines.append(f"  {option}: {option.step * 1e3:.1f} ms a token{taken}")
    return "\n".join(lines)

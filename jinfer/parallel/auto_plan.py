"""Automatic offload: what `devices = "auto"` moves to the host where device memory is too small.

For each layout of the devices and each kind of offload, the smallest change that fits is a
candidate; the one with the shortest decode step by the cost model is taken. Where everything fits
nothing changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jinfer.engine.scheduling.cache_size import free_memory, host_memory
from jinfer.modelspec.partition_table import AUTO, CPU
from jinfer.modelspec.spec_errors import SpecError
from jinfer.parallel.cost_model import Hardware, device_layouts, estimate_with_offload
from jinfer.parallel.memory_plan import MemoryPlanner, fitting_offloads, memory_planner
from jinfer.parallel.placement import (
    HOST_HARDWARE,
    ModelToPlace,
    hardware_of,
    model_cost,
    partition_plan,
)

_OFFLOADS = "host_embeddings", "host_kv_cache", "cpu_layers", "streamed_layers"
_SHOWN = 4  # candidates that the report lists


@dataclass(frozen=True)
class OffloadOption:
    """A way to make a model fit.

    Attributes:
        keys: keys of `[partition]` and their values.
        step: estimated seconds of a decode step.
    """

    keys: Mapping[str, Any]
    step: float

    def __str__(self) -> str:
        """The keys as they would be written in TOML."""
        values = {key: f'"{v}"' if isinstance(v, str) else str(v) for key, v in self.keys.items()}
        return ", ".join(f"{key} = {value.lower()}" for key, value in values.items())


@dataclass(frozen=True)
class _FitCheck:
    """Checks whether a model fits with certain keys of `[partition]`."""

    whole: ModelToPlace
    free: Callable[[str], float]

    def sizing(self, keys: Mapping[str, Any]) -> MemoryPlanner:
        """The memory planner with these keys. Raises `SpecError` where they are not possible."""
        changed = self.whole.with_partition(**keys)
        return memory_planner(partition_plan(changed, dry_run=True), changed, self.free)

    def fits(self, keys: Mapping[str, Any]) -> bool:
        """Whether everything fits with these keys."""
        try:
            return not self.sizing(keys).asked().problem
        except SpecError:
            return False


def resolve_auto(whole: ModelToPlace) -> tuple[ModelToPlace, str]:
    """The model with the offload that "auto" chooses, and a report that says why.

    Nothing changes where the devices' memory suffices, where the specification sets a key of host
    memory itself, and where the devices are CPUs.
    """
    part = whole.spec.partition
    if part.devices is None or part.devices.strip() != AUTO or not has_own_memory(jax.devices()):
        return whole, ""
    if any(getattr(part, key) for key in _OFFLOADS):
        return whole, ""
    free, count = free_memories(), len(jax.devices())
    if _FitCheck(whole, free).fits({}):
        return whole, ""
    fitting = offload_options(whole, hardware_of(jax.devices()), count, free)
    if not fitting:
        return whole, ""
    return whole.with_partition(**fitting[0].keys), explain_choice(fitting, count)


def has_own_memory(devices: Sequence[jax.Device]) -> bool:
    """Whether the devices have memory apart from the host's."""
    return devices[0].platform != CPU


def free_memories() -> Callable[[str], float]:
    """A function from a device's number, or `HOST`, to its free bytes."""
    free = {str(number): free_memory(device) for number, device in enumerate(jax.devices())}
    host = host_memory()
    return lambda name: free.get(name, host)


def offload_options(
    whole: ModelToPlace, machine: Hardware, count: int, free: Callable[[str], float]
) -> list[OffloadOption]:
    """The offload options that fit on so many devices and the host, the fastest first.

    Args:
        machine: the speeds of a device.
        free: a function from a device's number, or `HOST`, to its free bytes.
    """
    asked, work = _FitCheck(whole, free), model_cost(whole)
    fitting = list[OffloadOption]()
    for layout in device_layouts(count):
        if layout[0] > work.layers:
            continue
        devices = {"devices": _device_string(layout)}
        for keys in _fitting_changes(asked, devices, work.layers):
            layouts = work, machine, HOST_HARDWARE, layout
            step = estimate_with_offload(*layouts, context=whole.context, **keys)
            fitting.append(OffloadOption(devices | dict(keys), step))
    return sorted(fitting, key=lambda option: (option.step, len(option.keys)))


def _fitting_changes(
    asked: _FitCheck, devices: Mapping[str, Any], layers: int
) -> Iterator[Mapping[str, Any]]:
    """For each kind of offload, the smallest change that fits."""
    for start in ({}, {"host_embeddings": True}):
        try:
            sizing = asked.sizing({**devices, **start})
        except SpecError:  # the model cannot be divided among these devices
            continue
        if not sizing.asked().problem:
            yield start
            continue
        for more in fitting_offloads(sizing):
            yield {**start, **more}
    fewest = bisect_left(
        range(1, layers), True, key=lambda n: asked.fits({**devices, "cpu_layers": n})
    )
    if fewest < layers - 1:
        yield {"cpu_layers": fewest + 1}


def _device_string(layout: tuple[int, int]) -> str:
    """The devices of a layout, in the grammar of `partition.devices`."""
    pipe, tensor = layout
    stages = (range(stage * tensor, (stage + 1) * tensor) for stage in range(pipe))
    return ";".join("&".join(map(str, stage)) for stage in stages)


def explain_choice(fitting: Sequence[OffloadOption], count: int) -> str:
    """The report: why the first option was taken, and the next best ones."""
    noun = f"{count} devices" if count > 1 else "one device"
    lines = [f'devices = "{AUTO}": the model alone does not fit on {noun}; what would, estimated:']
    for number, option in enumerate(fitting[:_SHOWN]):
        taken = ", taken" if number == 0 else ""
        lines.append(f"  {option}: {option.step * 1e3:.1f} ms a token{taken}")
    return "\n".join(lines)

"""The devices of a stage: how arrays get there, and how functions are compiled for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jinfer.parallel.sharding_rules import AXIS

HOST_MEMORY = "pinned_host"  # the host's, from which a device reads at the link's speed


@dataclass(frozen=True)
class Site:
    """Some devices that compute a stage together.

    An array is either the same on all of them, or each has its own part: these are an array whose
    first axis is that of all parts one after the other, so that a program sees its device's part
    as it is.
    """

    devices: tuple[jax.Device, ...]

    @property
    def platform(self) -> str:
        """What kind of devices they are."""
        return self.devices[0].platform

    @cached_property
    def here(self) -> tuple[int, ...]:
        """Which of the devices are this process's, by their places."""
        own = jax.process_index()
        return tuple(i for i, one in enumerate(self.devices) if one.process_index == own)

    @cached_property
    def mesh(self) -> Mesh:
        """The devices as one axis."""
        return Mesh(np.array(self.devices), (AXIS,))

    @cached_property
    def same(self) -> Sharding:
        """Of arrays that every device has whole."""
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def parts(self) -> Sharding:
        """Of arrays of which each device has its own part."""
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, PartitionSpec(AXIS))

    def take(self, array: Any) -> Array:
        """An array of the host or of another site, on all devices here; nobody waits for it."""
        sources = [array]
        if isinstance(array, Array):
            if array.sharding.device_set == set(self.devices):
                return array
            # JAX would send an array between sets of different sizes through the host.
            sources = [shard.data for shard in array.addressable_shards]
        elif len(self.here) == len(self.devices):
            return jax.device_put(array, self.same)
        copies = [jax.device_put(sources[i % len(sources)], self.devices[i]) for i in self.here]
        if len(self.devices) == 1:
            return copies[0]
        return jax.make_array_from_single_device_arrays(array.shape, self.same, copies)

    def taken(self, tree: Any) -> Any:
        """`take` of each array of a tree."""
        return jax.tree.map(self.take, tree)

    def joined(self, parts: Sequence[Any], memory: str | None = None) -> Array:
        """The parts of the devices, from the host, as one array; of this process's alone.

        Args:
            memory: where it is to be; None: in the devices' own.
        """
        arrays = [
            jax.device_put(part, SingleDeviceSharding(self.devices[i], memory_kind=memory))
            for part, i in zip(parts, self.here, strict=True)
        ]
        if len(self.devices) == 1:
            return arrays[0]
        first, *rest = arrays[0].shape
        shape = (len(self.devices) * first, *rest)
        sharding = self.parts if memory is None else self.parts.with_memory_kind(memory)
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def of_parts(self, tree: Any) -> Any:
        """The abstract arrays of all devices, of which one has these."""
        times = len(self.devices)

        def of_all(part: Any) -> jax.ShapeDtypeStruct:
            # XLA gives arrays without elements back as if all devices had them whole.
            sharding = self.parts if part.size else self.same
            shape = (times * part.shape[0], *part.shape[1:])
            return jax.ShapeDtypeStruct(shape, part.dtype, sharding=sharding)

        return jax.tree.map(of_all, tree)

    def of_same(self, tree: Any) -> Any:
        """The abstract arrays that all devices have whole."""
        return jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=self.same), tree
        )

    def shared(
        self, function: Callable[..., Any], parts: Sequence[bool], out: Any
    ) -> Callable[..., Any]:
        """A function that each device runs on its own parts.

        Args:
            parts: of which arguments each device has its own part.
            out: the same of the results: a boolean, or a tuple of them.
        """
        if len(self.devices) == 1:
            return function
        own, whole = PartitionSpec(AXIS), PartitionSpec()
        results = jax.tree.map(lambda is_part: own if is_part else whole, out)
        given = tuple(own if is_part else whole for is_part in parts)
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=given, out_specs=results, check_vma=False
        )


def first_copy(array: Array) -> Array:
    """An array that every device of a site has whole, as the first of them has it."""
    return array if len(array.sharding.device_set) == 1 else array.addressable_data(0)

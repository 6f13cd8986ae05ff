"""Mesh: the tensor-parallel device group of a pipeline stage, with its shardings and transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jinfer.parallel.sharding_rules import TENSOR_AXIS

HOST_MEMORY = "pinned_host"  # JAX's memory kind for page-locked host memory, for fast copies


@dataclass(frozen=True)
class DeviceGroup:
    """The devices that compute a stage together: a mesh of one axis, `TENSOR_AXIS`.

    An array is either replicated or divided along one axis, into shards in the order of the
    devices. Shards may end in padding, or repeat a shard of another device.
    """

    devices: tuple[jax.Device, ...]

    @property
    def platform(self) -> str:
        """The devices' platform, such as "cpu" or "gpu"."""
        return self.devices[0].platform

    @cached_property
    def local(self) -> tuple[int, ...]:
        """Indices in `devices` of those that belong to this process."""
        rank = jax.process_index()
        return tuple(i for i, device in enumerate(self.devices) if device.process_index == rank)

    @cached_property
    def mesh(self) -> Mesh:
        """The devices as a mesh of one axis."""
        return Mesh(np.array(self.devices), (TENSOR_AXIS,))

    def sharding(self, spec: PartitionSpec) -> Sharding:
        """The sharding of arrays with a partition spec."""
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, spec)

    @cached_property
    def replicated(self) -> Sharding:
        """The sharding of replicated arrays."""
        return self.sharding(PartitionSpec())

    def replicate(self, array: Any) -> Array:
        """An array of the host or of another group, replicated on this group; asynchronous."""
        sources = [array]
        if isinstance(array, Array):
            if array.sharding.device_set == set(self.devices):
                return array
            # `device_put` between device sets of different sizes would go through the host.
            sources = [shard.data for shard in array.addressable_shards]
        elif len(self.local) == len(self.devices):
            return jax.device_put(array, self.replicated)
        copies = [jax.device_put(sources[i % len(sources)], self.devices[i]) for i in self.local]
        if len(self.devices) == 1:
            return copies[0]
        return jax.make_array_from_single_device_arrays(array.shape, self.replicated, copies)

    def join_shards(
        self, shards: Sequence[Any], axis: int | None, memory: str | None = None
    ) -> Array:
        """The array of this process's shards, which are in host memory.

        Args:
            axis: along which it is divided; None: it is replicated.
            memory: JAX's memory kind to put it in; None: the devices' own memory.
        """
        arrays = [
            jax.device_put(shard, SingleDeviceSharding(self.devices[i], memory_kind=memory))
            for shard, i in zip(shards, self.local, strict=True)
        ]
        if len(self.devices) == 1:
            return arrays[0]
        whole = self.abstract(arrays[0], axis)
        sharding = whole.sharding if memory is None else whole.sharding.with_memory_kind(memory)
        return jax.make_array_from_single_device_arrays(whole.shape, sharding, arrays)

    def abstract(self, tree: Any, axis: int | None = None) -> Any:
        """The abstract arrays whose shards on one device are the arrays of a tree.

        Args:
            axis: along which they are divided, or their last one if they have fewer; None: they are
                replicated.
        """
        count = len(self.devices)

        def whole(shard: Any) -> jax.ShapeDtypeStruct:
            shape, spec = list(shard.shape), PartitionSpec()
            # XLA returns arrays without elements as if they were replicated.
            if axis is not None and shard.size and count > 1:
                at = min(axis, len(shape) - 1)
                shape[at] *= count
                spec = PartitionSpec(*[None] * at, TENSOR_AXIS)
            return jax.ShapeDtypeStruct(shape, shard.dtype, sharding=self.sharding(spec))

        return jax.tree.map(whole, tree)

    def shard_map(
        self, function: Callable[..., Any], arguments: Sequence[Any], out: Any
    ) -> Callable[..., Any]:
        """`jax.shard_map` of a function over the group; on one device the function itself.

        Args:
            arguments: abstract, with their shardings.
            out: the partition specs of its results, see `partition_specs`.
        """
        if len(self.devices) == 1:
            return function
        specs = tuple(partition_specs(argument) for argument in arguments)
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False
        )


def partition_specs(tree: Any) -> Any:
    """The partition specs of abstract arrays."""
    return jax.tree.map(lambda array: getattr(array.sharding, "spec", PartitionSpec()), tree)


def first_replica(array: Any) -> Any:
    """The first device's copy of a replicated array; an abstract array stays."""
    if not isinstance(array, Array) or len(array.sharding.device_set) == 1:
        return array
    return array.addressable_data(0)

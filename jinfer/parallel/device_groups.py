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

    An array is either replicated or sharded. A sharded array is the concatenation of the devices'
    shards along its first axis, so that inside `shard_map` each device sees its shard unchanged.
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

    @cached_property
    def replicated(self) -> Sharding:
        """The sharding of replicated arrays."""
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def sharded(self) -> Sharding:
        """The sharding of arrays of which each device has its own shard."""
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, PartitionSpec(TENSOR_AXIS))

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

    def replicate_tree(self, tree: Any) -> Any:
        """`replicate` for each array of a tree."""
        return jax.tree.map(self.replicate, tree)

    def join_shards(self, shards: Sequence[Any], memory: str | None = None) -> Array:
        """A sharded array from this process's shards, which are in host memory.

        Args:
            memory: JAX's memory kind to put it in; None: the devices' own memory.
        """
        arrays = [
            jax.device_put(shard, SingleDeviceSharding(self.devices[i], memory_kind=memory))
            for shard, i in zip(shards, self.local, strict=True)
        ]
        if len(self.devices) == 1:
            return arrays[0]
        first, *rest = arrays[0].shape
        shape = (len(self.devices) * first, *rest)
        sharding = self.sharded if memory is None else self.sharded.with_memory_kind(memory)
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def abstract_shards(self, tree: Any) -> Any:
        """The abstract sharded arrays whose shards on one device are the arrays of `tree`."""
        count = len(self.devices)

        def whole_array(shard: Any) -> jax.ShapeDtypeStruct:
            # XLA returns arrays without elements as if they were replicated.
            sharding = self.sharded if shard.size else self.replicated
            shape = (count * shard.shape[0], *shard.shape[1:])
            return jax.ShapeDtypeStruct(shape, shard.dtype, sharding=sharding)

        return jax.tree.map(whole_array, tree)

    def as_shards(self, tree: Any) -> Any:
        """The abstract arrays of a tree, which a program of this group has returned as shards."""
        return jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self.sharded),
            tree,
        )

    def abstract_replicated(self, tree: Any) -> Any:
        """The abstract replicated arrays of a tree."""
        return jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self.replicated),
            tree,
        )

    def shard_map(
        self, function: Callable[..., Any], parts: Sequence[bool], out: Any
    ) -> Callable[..., Any]:
        """`jax.shard_map` of a function over the group; on one device the function itself.

        Args:
            parts: for each argument, whether it is sharded; else it is replicated.
            out: the same for the results: a boolean, or a tuple of them.
        """
        if len(self.devices) == 1:
            return function
        sharded, replicated = PartitionSpec(TENSOR_AXIS), PartitionSpec()
        out_specs = jax.tree.map(lambda is_sharded: sharded if is_sharded else replicated, out)
        in_specs = tuple(sharded if is_sharded else replicated for is_sharded in parts)
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def first_replica(array: Array) -> Array:
    """The first device's copy of a replicated array."""
    return array if len(array.sharding.device_set) == 1 else array.addressable_data(0)

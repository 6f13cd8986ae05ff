"""Draft model on another device: compiled programs for a given device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jinfer.engine.runner.compiled_programs import CompiledPrograms, Program
from jinfer.engine.runner.device_state import State
from jinfer.engine.runner.mmap_limit import check_maps
from jinfer.engine.runner.program_cache import compiled
from jinfer.engine.runner.step_key import StepKey
from jinfer.ops.attention.kv_cache import Cache
from jinfer.ops.backend import target_platform
from jinfer.parallel.shard_params import packed_for_target


@dataclass(kw_only=True)
class OtherDevicePrograms(CompiledPrograms):
    """Programs for a given device.

    Attributes:
        device: where they run.
    """

    device: jax.Device

    @property
    def pointer_layers(self) -> Mapping[str, slice]:
        """As `CompiledPrograms.pointer_layers`, for the device."""
        with target_platform(self.device.platform):
            return super().pointer_layers

    def allocate_kv_cache(self) -> Cache:
        """As `CompiledPrograms.allocate_kv_cache`, on the device."""
        like, there = self.cache, SingleDeviceSharding(self.device)

        def made() -> Cache:
            return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), like)

        return jax.jit(made, out_shardings=there)()

    def empty_state(self) -> State:
        """As `CompiledPrograms.empty_state`, on the device."""
        return jax.device_put(super().empty_state(), self.device)

    def _compile(self, key: StepKey) -> Program:
        check_maps()
        with self._tracing, target_platform(self.device.platform):
            function, donated, arguments = self.step_function(key)
            there = SingleDeviceSharding(self.device)
            placed = jax.tree.map(
                lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=there), arguments
            )
            lowered = jax.jit(function, donate_argnums=donated).lower(*placed)
        return compiled(lowered)

    def place(self, names: Sequence[str], values: Any) -> Any:
        """Puts a parameter, of NumPy arrays, on the device."""
        with target_platform(self.device.platform):
            values = packed_for_target(values)
        return jax.block_until_ready(jax.device_put(values, self.device))

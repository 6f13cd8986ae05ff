"""Draft model on another device: places its weights there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jinfer.ops.backend import target_platform
from jinfer.parallel.shard_params import packed_for_target


def put_on(device: jax.Device) -> Callable[[Sequence[str], Any], Any]:
    """A function of a parameter's names and NumPy arrays, which puts it on a device."""

    def put(names: Sequence[str], values: Any) -> Any:
        with target_platform(device.platform):
            values = packed_for_target(values)
        return jax.block_until_ready(jax.device_put(values, device))

    return put

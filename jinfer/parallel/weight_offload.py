"""Weight offload: layers' weights stay in pinned host memory and are prefetched to the device.

The weights of the next offloaded layer are copied while the current one computes (double
buffering). `partition.streamed_layers` says how many layers are offloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jinfer.parallel.device_groups import DeviceGroup

type Leaves = tuple[jax.Array, ...]


@dataclass
class WeightPrefetcher:
    """Copies the weights of offloaded stages to their devices, one stage ahead.

    At most two stages' weights are on the device: before the next copy starts, the stage before
    the current one has ended, and its weights are free.

    Attributes:
        device_group: the devices that compute these stages.
        turns: the numbers of the offloaded stages, in order; after the last comes the first.
    """

    device_group: DeviceGroup
    turns: tuple[int, ...]
    _brought: dict[int, Leaves] = field(default_factory=dict)
    _before: Any = None

    def take(self, number: int, leaves: Mapping[int, Leaves]) -> Leaves:
        """The weights of a stage, on its devices; the caller drops them after use.

        Args:
            leaves: the weights of all offloaded stages, in host memory.
        """
        if number not in self._brought:
            self._brought.clear()  # prefetched for a pass that ended early
        jax.block_until_ready(self._before)
        weights = self._brought.pop(number, None) or self._bring(leaves[number])
        following = self.turns[(self.turns.index(number) + 1) % len(self.turns)]
        self._brought[following] = self._bring(leaves[following])
        return weights

    def computed(self, out: Any) -> None:
        """Records the result of the stage that last took its weights; it may not be donated."""
        self._before = out

    def forget(self) -> None:
        """Drops the prefetched weights."""
        self._brought, self._before = {}, None

    def _bring(self, leaves: Leaves) -> Leaves:
        shardings = [
            self.device_group.sharded if leaf.size else self.device_group.replicated
            for leaf in leaves
        ]
        return tuple(jax.device_put(leaves, tuple(shardings)))

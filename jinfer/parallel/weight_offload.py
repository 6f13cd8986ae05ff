"""Weights that stay in host memory and come to the device for their layer's turn alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jinfer.parallel.device_groups import Site

type Leaves = tuple[jax.Array, ...]


@dataclass
class Stream:
    """Brings the weights of some stages, the next one's while one computes.

    So there are those of two stages on the device at most: before the next ones are brought, the
    stage before this one has ended, and with it the last use of its weights.

    Attributes:
        site: where they are needed.
        turns: the stages' numbers, in their order; after the last one comes the first.
    """

    site: Site
    turns: tuple[int, ...]
    _brought: dict[int, Leaves] = field(default_factory=dict)
    _before: Any = None

    def take(self, number: int, leaves: Mapping[int, Leaves]) -> Leaves:
        """The weights of a stage, on its devices, to be let go after their use.

        Args:
            leaves: of all stages that take turns, as they are in host memory.
        """
        if number not in self._brought:
            self._brought.clear()  # what a pass that ended early had brought
        jax.block_until_ready(self._before)
        own = self._brought.pop(number, None) or self._bring(leaves[number])
        following = self.turns[(self.turns.index(number) + 1) % len(self.turns)]
        self._brought[following] = self._bring(leaves[following])
        return own

    def computed(self, out: Any) -> None:
        """Notes what the last stage whose weights were taken gives, which nobody gives away."""
        self._before = out

    def forget(self) -> None:
        """Lets what was brought go."""
        self._brought, self._before = {}, None

    def _bring(self, leaves: Leaves) -> Leaves:
        shardings = [self.site.parts if leaf.size else self.site.same for leaf in leaves]
        return tuple(jax.device_put(leaves, tuple(shardings)))

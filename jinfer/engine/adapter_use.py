"""Adapter of a request: the slot of its LoRA adapter, and by how much it is scaled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AdapterUse:
    """The LoRA adapter that a request is computed with.

    Attributes:
        name: what it was loaded as.
        slot: where its parameters stand in the stacks, from 1.
        digest: hash of its contents.
        scale: what its terms are multiplied by, beside its own factor.
    """

    name: str
    slot: int
    digest: bytes
    scale: float = 1.0

    @property
    def entry(self) -> tuple[int, int]:
        """What a program is told of it: the slot, and the scale's bits."""
        return self.slot, int(np.float32(self.scale).view(np.int32))

    @property
    def seed(self) -> bytes:
        """What keys and values depend on beside the tokens."""
        return b"adapter" + self.digest + np.float32(self.scale).tobytes()

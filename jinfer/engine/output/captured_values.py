"""Captured activations: a request's values at the names that it asked for, as they are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(eq=False)
class CapturedValues:
    """The captured values of one request, as far as they were computed.

    Attributes:
        names: of the values.
    """

    names: Sequence[str]
    _pieces: list[tuple[np.ndarray, Mapping[str, np.ndarray]]] = field(default_factory=list)

    def add(self, positions: Int[np.ndarray, " rows"], values: Mapping[str, np.ndarray]) -> None:
        """Adds values [rows, ...] at some positions, -1 for none.

        Those of a position that is computed again replace the earlier ones, which are equal.
        """
        self._pieces.append((positions, values))

    def until(self, count: int) -> dict[str, Float[np.ndarray, "tokens ..."]]:
        """The values of the first tokens by name, float32."""
        found = dict[str, np.ndarray]()
        for positions, values in self._pieces:
            there = (positions >= 0) & (positions < count)
            for name in self.names:
                part = values[name]
                if name not in found:
                    found[name] = np.zeros((count, *part.shape[1:]), np.float32)
                found[name][positions[there]] = part[there]
        return found

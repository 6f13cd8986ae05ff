"""Arrays without numbers: shapes and types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


class Abstract:
    """What `jax.ShapeDtypeStruct` is, also before JAX is imported; JAX takes it as well.

    Attributes:
        shape: of the array.
        dtype: of its numbers.
        sharding: None: it is on the one device, if anywhere.
    """

    __slots__ = ("dtype", "shape")
    sharding = None

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)

    @property
    def ndim(self) -> int:
        """Axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Numbers."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.dtype.itemsize

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Abstract):
            return NotImplemented
        return self.shape == other.shape and self.dtype == other.dtype

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))

    def __repr__(self) -> str:
        return f"Abstract({self.shape}, {self.dtype.name})"

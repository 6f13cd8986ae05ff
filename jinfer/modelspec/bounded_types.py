"""Bounded number types for the fields of blocks and settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any


@dataclass(frozen=True)
class Bounds:
    """Minimum and maximum of a number, and their description in errors and documentation."""

    least: float
    most: float
    text: str


# Sizes end at JAX's 32-bit indices; other numbers stay well inside float32.
Size = Annotated[int, Bounds(1, 2**31 - 1, "a whole number from 1 to 2^31 - 1")]
Count = Annotated[int, Bounds(0, 2**31 - 1, "a whole number from 0 to 2^31 - 1")]
LayerCount = Annotated[int, Bounds(1, 10000, "a whole number from 1 to 10000")]
Positive = Annotated[float, Bounds(1e-30, 1e30, "a number above 0")]
Fraction = Annotated[float, Bounds(0, 1, "a number from 0 to 1")]
NotNegative = Annotated[float, Bounds(0, 1e30, "a number from 0 on")]

# Default context length: a cache for the whole context of a modern model would fill the memory.
DEFAULT_CONTEXT = 4096


def dim(name: str, axis: str = "") -> Any:
    """A size that defaults to a dimension of `[dims]`.

    Args:
        axis: the logical axis of the block's parameters that has this size, if it can be divided.
    """
    return field(metadata={"dim": name, "axis": axis})

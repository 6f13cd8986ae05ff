"""Scaled values: matrices in FP8 (E4M3) as a checkpoint has them, with the scales of each row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class ScaledValues:
    """A matrix [*stack, outputs, inputs]: numbers, and a scale for each block of a row's inputs.

    Attributes:
        numbers: reads them, float8_e4m3fn [*stack, outputs, inputs].
        scales: reads those of each row, float32 [*stack, outputs, ceil(inputs / block)].
        block: inputs that share a scale.
        blocks: of a row.
    """

    numbers: Callable[[], np.ndarray]
    scales: Callable[[], Float[np.ndarray, "*stack outputs blocks"]]
    block: int
    blocks: int

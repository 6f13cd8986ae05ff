"""Weights with an adapter's term in them, which has to leave them finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jinfer.loader.adapters.lora_adapter import LoraAdapter
from jinfer.loader.weights.tensor_mapping import LoadError

if TYPE_CHECKING:
    from jaxtyping import Float


def finite_sum(
    weight: Float[np.ndarray, "*experts outputs inputs"],
    term: Float[np.ndarray, "*experts outputs inputs"],
    adapter: LoraAdapter,
    name: str,
) -> Float[np.ndarray, "*experts outputs inputs"]:
    """The sum of a weight and the term of an adapter's module.

    Args:
        name: of the module.

    Raises:
        LoadError: finite weights become infinite, or NaN.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # found below
        whole = weight + term
    if not np.isfinite(whole).all() and np.isfinite(weight).all():
        raise LoadError(
            f"{adapter.path}: {name}: lora_B times lora_A times its scale (lora_alpha) is too "
            "large for float32; lower that, or train it again"
        )
    return whole


def with_lengths(
    weight: Float[np.ndarray, "outputs inputs"],
    magnitude: Float[np.ndarray, "outputs 1"],
    adapter: LoraAdapter,
    name: str,
) -> Float[np.ndarray, "outputs inputs"]:
    """A weight with rows of a DoRA's lengths.

    Raises:
        LoadError: a row has no direction, or no length in float32.
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # found below
        length = np.linalg.norm(weight, axis=1, keepdims=True)
        factor = magnitude / length
    if not (np.isfinite(length).all() and np.isfinite(factor).all()) and np.isfinite(weight).all():
        raise LoadError(
            f"{adapter.path}: {name}: with its term, rows are 0 or too long for their magnitudes "
            "(DoRA) in float32; train it again, or lower its scale (lora_alpha)"
        )
    return weight * factor

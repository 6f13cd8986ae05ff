"""Top-k and top-p (nucleus) thresholds on a GPU; `jinfer.sampling` has the XLA version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax import Array

from jinfer.ops import gpu_backend
from jinfer.ops.backend import interpreted

if TYPE_CHECKING:
    from jaxtyping import Float, UInt


def available() -> bool:
    """Whether code traced here can use the kernel: on a GPU, with the Triton-style back end."""
    return gpu_backend.has_triton_kernels("sampling")


def mass_threshold(
    order: UInt[Array, "rows numbers"],
    weights: Float[Array, "rows numbers"],
    mass: Float[Array, " rows"],
) -> UInt[Array, " rows"]:
    """The largest threshold at or above which the values weigh at least `mass`; or else 0."""
    # Imported lazily: Pallas is slow to import and only a GPU needs it.
    from kernels_pallas import topk_threshold

    return topk_threshold.mass_threshold(order, weights, mass, interpret=interpreted())

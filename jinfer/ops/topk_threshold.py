"""Top-k and top-p thresholds on a GPU; `jinfer.sampling.thresholds` has XLA's way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax import Array

from jinfer.ops import disable_kernels, gpu_backend
from jinfer.ops.backend import backend, interpreted

if TYPE_CHECKING:
    from jaxtyping import Float, UInt


def available() -> bool:
    """Whether what is traced can call them: they are Triton-style."""
    return (
        backend() == "gpu"
        and disable_kernels.kernels("sampling")
        and gpu_backend.kind() == "triton"
    )


def least(
    order: UInt[Array, "rows numbers"],
    weights: Float[Array, "rows numbers"],
    mass: Float[Array, " rows"],
) -> UInt[Array, " rows"]:
    """The largest bits at or above which numbers weigh at least `mass`; 0 where none do."""
    # Imported here: half a second, which only those pay who have a GPU.
    from kernels_pallas import topk_threshold

    return topk_threshold.least(order, weights, mass, interpret=interpreted())

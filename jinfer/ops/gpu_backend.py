"""GPU kernel back end: Triton-style Pallas while JAX has it, else XLA.

JAX has deprecated its Triton-style back end. Once it is gone, XLA computes what the kernels do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jinfer.ops import disable_kernels
from jinfer.ops.backend import backend

if TYPE_CHECKING:
    from kernels_pallas import Backend


def selected_backend() -> Backend:
    """The back end in use."""
    # Imported lazily: Pallas is slow to import and only a GPU needs it.
    from kernels_pallas.triton_ops import DEFAULT

    return DEFAULT


def fuses_prologue() -> bool:
    """Whether operations before a matmul are fused into its prologue kernel."""
    return has_triton_kernels("products")


def has_triton_kernels(which: disable_kernels.KernelKind) -> bool:
    """Whether code traced here can use the Triton-style kernels of a kind."""
    is_on = backend() == "gpu" and disable_kernels.kernels_enabled(which)
    return is_on and selected_backend() == "triton"

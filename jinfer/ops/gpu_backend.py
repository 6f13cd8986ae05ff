"""GPU kernel back end: Triton-style Pallas (the default) or Mosaic GPU ($JINFER_KERNELS).

The Triton-style back end is complete and the default while JAX has it. JAX has deprecated it: the
Mosaic GPU back end is its successor, chosen automatically once JAX drops Triton. XLA computes the
operations that Mosaic GPU lacks:

- attention: only caches of 16-bit keys and values of up to 256 numbers; no quantized KV cache, no
  MLA (wider latents), no T5 distance table (`by_distance`);
- matmul: quantized matrices only in layouts `kernels_pallas.matmul.mosaic.takes` admits; no grouped
  matmul of plain (unquantized) experts;
- fusion: no fused prologue (norm, residual, gate), no fused rope and KV cache write;
- sampling: no top-k / top-p threshold kernel.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from jinfer.ops import disable_kernels
from jinfer.ops.backend import backend
from jinfer.ops.disable_kernels import SwitchError

if TYPE_CHECKING:
    from kernels_pallas import Backend

KERNELS_VARIABLE = "JINFER_KERNELS"


def selected_backend() -> Backend:
    """The back end in use: $JINFER_KERNELS, or else Triton-style while JAX has it.

    XLA computes the operations that Mosaic kernels do not support.

    Raises:
        SwitchError: see `requested_backend`.
    """
    if (requested := requested_backend()) is not None:
        return requested
    # Imported lazily: Pallas is slow to import and only a GPU needs it.
    from kernels_pallas.triton_ops import DEFAULT

    return DEFAULT


def fuses_prologue() -> bool:
    """Whether operations before a matmul are fused into its prologue kernel (Triton-style only)."""
    return has_triton_kernels("products")


def has_triton_kernels(which: disable_kernels.KernelKind) -> bool:
    """Whether code traced here can use the Triton-style kernels of a kind."""
    is_on = backend() == "gpu" and disable_kernels.kernels_enabled(which)
    return is_on and selected_backend() == "triton"


def requested_backend() -> Literal["triton", "mosaic"] | None:
    """Reads $JINFER_KERNELS.

    Raises:
        SwitchError: the value is unknown.
    """
    match os.environ.get(KERNELS_VARIABLE, "").strip():
        case "":
            return None
        case "triton":
            return "triton"
        case "mosaic":
            return "mosaic"
        case other:
            raise SwitchError(
                f"{KERNELS_VARIABLE}: there are no kernels {other!r}; give triton or mosaic"
            )

"""Which kind of kernels a GPU is given."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from jinfer.ops import disable_kernels
from jinfer.ops.backend import backend
from jinfer.ops.disable_kernels import SwitchError

if TYPE_CHECKING:
    from kernels_pallas import Backend

KIND = "JINFER_KERNELS"


def kind() -> Backend:
    """ "triton" or "mosaic", as $JINFER_KERNELS says; else Triton-style ones while JAX has them.

    What Mosaic kernels do not take is computed by XLA.

    Raises:
        SwitchError: see `asked_for`.
    """
    if (given := asked_for()) is not None:
        return given
    # Imported here: half a second, which only those pay who have a GPU.
    from kernels_pallas.triton_ops import DEFAULT

    return DEFAULT


def prepares_rows() -> bool:
    """Whether what stands before a GPU's products is computed by a kernel, Triton-style."""
    return backend() == "gpu" and disable_kernels.kernels("products") and kind() == "triton"


def asked_for() -> Literal["triton", "mosaic"] | None:
    """What $JINFER_KERNELS says.

    Raises:
        SwitchError: it has another word.
    """
    match os.environ.get(KIND, "").strip():
        case "":
            return None
        case "triton":
            return "triton"
        case "mosaic":
            return "mosaic"
        case other:
            raise SwitchError(f"{KIND}: there are no kernels {other!r}; give triton or mosaic")

"""Which kind of kernels a GPU is given."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels_pallas import Backend

KIND = "JINFER_KERNELS"


def kind() -> Backend:
    """ "triton" or "mosaic", as $JINFER_KERNELS says; else Triton-style ones while JAX has them.

    What Mosaic kernels do not take is computed by XLA.

    Raises:
        ValueError: $JINFER_KERNELS says something else.
    """
    # Imported here: half a second, which only those pay who have a GPU.
    from kernels_pallas.triton_style import DEFAULT

    given = os.environ.get(KIND, "").strip()
    if given == "triton":
        return "triton"
    if given == "mosaic":
        return "mosaic"
    if given:
        raise ValueError(f"{KIND}: there are no kernels {given!r}; give triton or mosaic")
    return DEFAULT

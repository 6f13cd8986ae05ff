"""LoRA as a custom call: low-rank terms of the rows' adapters, added to products of these rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax import Array

from jinfer.cpu.build_library import custom_call

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def add_lora(
    x: Float[Array, "rows inputs"],
    ys: Sequence[Float[Array, "rows outputs"]],
    slots: Int[Array, " rows"],
    scales: Float[Array, " rows"],
    order: Int[Array, " rows"],
    a: Sequence[Float[Array, "slots rank inputs"]],
    b: Sequence[Float[Array, "slots rank outputs"]],
    factors: Sequence[Float[Array, "slots 2 rank"] | None],
) -> tuple[Float[Array, "rows outputs"], ...]:
    """y + scale * (x A^T) B for each y, with the A and B of a row's slot, computed in float32.

    A row's bits do not depend on its company; those of a row without an adapter are y's.

    Args:
        x, ys: float32.
        slots: int32; from 1; 0: the row has no adapter.
        scales: float32.
        order: int32; the rows sorted by slot, so that each slot's matrices are read once.
        a, b: float32, bfloat16, float16 or int8; a stack for each y.
        factors: float32; of stacks in int8: what the rows of A, and those of B, are multiplied by.
    """
    shapes = [jax.ShapeDtypeStruct(y.shape, np.float32) for y in ys]
    in_place = {1 + i: i for i in range(len(ys))}
    second = [one for pair in zip(b, factors, strict=True) for one in pair if one is not None]
    call = custom_call("jinfer_lora", shapes, aliases=in_place)
    return tuple(call(x, *ys, slots, scales, order, *a, *second))

"""Matmul with float32, bfloat16, float16 or FP8 weights as one custom call.

Weights of 16 and 8 bits are read as they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax import Array

from jinfer.cpu.build_library import custom_call
from jinfer.cpu.quantized_matmul import ACTIVATIONS, selection

if TYPE_CHECKING:
    from jaxtyping import Float, Float8e4m3fn, Int


class ScaledMatrix(NamedTuple):
    """A matrix in FP8, E4M3, or a stack of them; each block of a row's inputs has a scale.

    A block is a power of two of at least 32 inputs, or the row, as the shapes say.
    """

    numbers: Float8e4m3fn[Array, "*stack outputs inputs"]
    scales: Float[Array, "*stack outputs blocks"]


def dense_linear(
    x: Float[Array, "rows inputs"],
    weights: Sequence[Float[Array, "*stack outputs inputs"] | ScaledMatrix],
    *,
    activation: str = "none",
    index: Int[Array, ""] | None = None,
    offsets: Int[Array, " experts_1"] | None = None,
    transposed: bool = False,
    part: slice | None = None,
    rounded: bool = False,
) -> tuple[Float[Array, "rows outputs"], ...]:
    """x @ weight.T for each weight, in float32; x is prepared once for all of them.

    Args:
        x: float32.
        weights: float32, bfloat16 or float16, converted to float32 without loss, or scaled, with
            each number times its scale rounded to float32.
        activation: other than "none": there are two weights, gate and up, of equal shape, and the
            one result is activation(x @ gate.T) * (x @ up.T).
        index, offsets: as in `quantized_linear`; with either, weights have three axes, else two.
        transposed: weights are [inputs, outputs] instead: x @ weight. Not of scaled ones.
        part: a slice of each matrix's rows to use.
        rounded: x may be rounded to bfloat16 for bfloat16 weights; it is where the processor has
            bfloat16 dot products or tiles (AVX-512 BF16, AMX).
    """
    results = weights if activation == "none" else weights[:1]
    outputs = [(w.numbers if isinstance(w, ScaledMatrix) else w).shape[-2:] for w in results]
    first, end, _ = (part or slice(None)).indices(outputs[0][0])
    widths = [w[1] if transposed else end - first if part else w[0] for w in outputs]
    shapes = [jax.ShapeDtypeStruct((x.shape[0], width), np.float32) for width in widths]
    select, selector = selection(index, offsets)
    out = custom_call("jinfer_dense", shapes)(
        x,
        *selector,
        *jax.tree.leaves(list(weights)),
        activation=np.int64(ACTIVATIONS.index(activation)),
        select=np.int64(select),
        transposed=np.bool_(transposed),
        first=np.int64(first),
        taken=np.int64(end - first if part else 0),
        rounded=np.bool_(rounded),
    )
    return tuple(out)

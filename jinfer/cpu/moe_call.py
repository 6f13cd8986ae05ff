"""MoE routing as custom calls: choice of experts, sorting by expert, weighted sum.

Results are batch-invariant to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax import Array

from jinfer.cpu.build_library import custom_call

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def route(
    logits: Float[Array, "rows experts"],
    correction: Float[Array, " experts"] | None,
    top_k: int,
    *,
    softmax: bool,
    renormalize: bool,
    scale: float,
) -> tuple[Int[Array, "rows top_k"], Float[Array, "rows top_k"]]:
    """Returns each row's top-k experts, the lower index among equals, and their weights.

    Args:
        logits: float32.
        correction: added to the scores for the selection only.
        softmax: scores are a softmax of the logits; else sigmoids of the logits.
        renormalize: weights are scores over their sum, else the scores; either times `scale`.
    """
    shape = logits.shape[0], top_k
    results = [jax.ShapeDtypeStruct(shape, kind) for kind in (np.int32, np.float32)]
    chosen, weights = custom_call("jinfer_route", results)(
        logits,
        *([] if correction is None else [correction]),
        softmax=np.bool_(softmax),
        renormalize=np.bool_(renormalize),
        scale=np.float32(scale),
    )
    return chosen, weights


class Sorted(NamedTuple):
    """Pairs of row and expert, sorted by expert and then by row.

    Attributes:
        row_of, expert_of: row and expert of each sorted pair.
        offsets: pairs offsets[i] .. offsets[i + 1] - 1 are expert i's.
        place_of: sorted index of each pair, in the order before sorting.
    """

    row_of: Int[Array, " pairs"]
    expert_of: Int[Array, " pairs"]
    offsets: Int[Array, " experts_1"]
    place_of: Int[Array, " pairs"]


def sort_by_expert(chosen: Int[Array, "rows top_k"], experts: int) -> Sorted:
    """Sorts pairs of row and expert by expert; `chosen` is int32 and below `experts`."""
    sizes = chosen.size, chosen.size, experts + 1, chosen.size
    results = [jax.ShapeDtypeStruct((size,), np.int32) for size in sizes]
    return Sorted(*custom_call("jinfer_sort_by_expert", results)(chosen))


def combine_experts(
    results: Float[Array, "pairs hidden"],
    place_of: Int[Array, " pairs"],
    weights: Float[Array, "rows top_k"],
) -> Float[Array, "rows hidden"]:
    """Sums each row's weighted expert results in the order of its experts, all float32."""
    shape = jax.ShapeDtypeStruct((weights.shape[0], results.shape[1]), np.float32)
    out: Array = custom_call("jinfer_combine_experts", shape)(results, place_of, weights)
    return out

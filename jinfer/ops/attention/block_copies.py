"""KV cache block copies: copy-on-write of blocks of a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
from jax import Array, lax

from jinfer.cpu.build_library import custom_call
from jinfer.ops.backend import has_cpu_calls

if TYPE_CHECKING:
    from jaxtyping import Int


def copy_blocks(
    arrays: Sequence[Array],
    sources: Int[Array, " copies"],
    targets: Int[Array, " copies"],
    count: Int[Array, ""],
) -> Sequence[Array]:
    """The arrays with some blocks copied.

    Args:
        sources, targets: block ids, copied in order, so that a copy can itself be copied.
        count: number of valid entries.
    """
    if not arrays or not has_cpu_calls():
        return copy_blocks_reference(arrays, sources, targets, count)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    in_place = {3 + i: i for i in range(len(shapes))}
    return custom_call("jinfer_copy_blocks", shapes, in_place)(sources, targets, count, *arrays)


def copy_blocks_reference(
    arrays: Sequence[Array],
    sources: Int[Array, " copies"],
    targets: Int[Array, " copies"],
    count: Int[Array, ""],
) -> Sequence[Array]:
    """`copy_blocks` in XLA operations."""

    def copied(i: Array, array: Array) -> Array:
        block = lax.dynamic_index_in_dim(array, sources[i], keepdims=False)
        return lax.dynamic_update_index_in_dim(array, block, targets[i], 0)

    def one(i: Array, arrays: Sequence[Array]) -> Sequence[Array]:
        return jax.tree.map(lambda array: copied(i, array), arrays)

    return lax.fori_loop(0, count, one, list(arrays))

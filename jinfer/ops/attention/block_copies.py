"""KV cache block copies: copy-on-write of blocks of a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
from jax import Array, lax

from jinfer.cpu import block_copies_call as cpu
from jinfer.ops.backend import backend

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
    if arrays and backend() == "cpu" and cpu.available():
        return cpu.copy_blocks(arrays, sources, targets, count)
    return copy_blocks_reference(arrays, sources, targets, count)


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

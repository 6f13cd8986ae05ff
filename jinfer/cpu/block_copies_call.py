"""Copies of blocks, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
from jax import Array

from jinfer.cpu import build_library

if TYPE_CHECKING:
    from jaxtyping import Int


def available() -> bool:
    """Whether there is such a custom call on this machine."""
    return build_library.register("jinfer_copy_blocks")


def copy_blocks(
    arrays: Sequence[Array],
    sources: Int[Array, " copies"],
    targets: Int[Array, " copies"],
    count: Int[Array, ""],
) -> list[Array]:
    """Arrays of blocks of which the first `count` targets have become copies of the sources."""
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    aliases = {3 + i: i for i in range(len(shapes))}
    call = jax.ffi.ffi_call("jinfer_copy_blocks", shapes, input_output_aliases=aliases)
    return list(call(sources, targets, count, *arrays))

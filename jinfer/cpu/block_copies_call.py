"""KV cache: copies whole blocks in place, as one custom call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
from jax import Array

from jinfer.cpu import build_library

if TYPE_CHECKING:
    from jaxtyping import Int


def available() -> bool:
    """Whether the custom call exists on this machine; compiles it the first time."""
    return build_library.register("jinfer_copy_blocks")


def copy_blocks(
    arrays: Sequence[Array],
    sources: Int[Array, " copies"],
    targets: Int[Array, " copies"],
    count: Int[Array, ""],
) -> list[Array]:
    """The arrays, with blocks `sources[i]` copied to `targets[i]` for i < count."""
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    aliases = {3 + i: i for i in range(len(shapes))}
    call = jax.ffi.ffi_call("jinfer_copy_blocks", shapes, input_output_aliases=aliases)
    return list(call(sources, targets, count, *arrays))

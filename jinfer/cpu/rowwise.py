"""Row-wise operations as custom calls: norms, RoPE, Hadamard, activations, softmax, argmax.

A row's bits do not depend on the other rows, unlike those of XLA's sums over a long last axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np
from jax import Array

from jinfer.cpu.build_library import custom_call
from jinfer.cpu.matmul_call import ACTIVATIONS

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def norm(
    x: Float[Array, "rows size"],
    weight: Float[Array, "groups size"] | None,
    bias: Float[Array, "groups size"] | None,
    *,
    centered: bool,
    eps: float,
    offset: float,
) -> Float[Array, "rows size"]:
    """Computes (x - mean) / sqrt(mean((x - mean)^2) + eps) * (weight + offset) + bias, float32.

    Args:
        weight, bias: row i uses group i % groups; None: 1 and 0.
        centered: False for mean = 0.
    """
    vectors = [vector for vector in (weight, bias) if vector is not None]
    return custom_call("jinfer_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))(
        x,
        *vectors,
        centered=centered,
        weighted=weight is not None,
        biased=bias is not None,
        eps=np.float32(eps),
        offset=np.float32(offset),
    )


def rotate(
    x: Float[Array, "rows width"],
    cos: Float[Array, "rows pairs"],
    sin: Float[Array, "rows pairs"],
    *,
    size: int,
    adjacent: bool,
) -> Float[Array, "rows width"]:
    """Applies RoPE; see `jinfer.ops.rope.rotate`. Products are rounded before adding.

    Args:
        x, cos, sin: float32.
    """
    call = custom_call("jinfer_rotate", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, cos, sin, size=np.int64(size), adjacent=adjacent)


def hadamard(
    x: Float[Array, "rows width"], *, size: int, query: bool
) -> Float[Array, "rows width"]:
    """Applies the Hadamard transform to each head, float32; see `jinfer.ops.attention.hadamard`."""
    call = custom_call("jinfer_hadamard", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, size=np.int64(size), query=query)


def softmax(x: Float[Array, "rows size"]) -> Float[Array, "rows size"]:
    """Computes the softmax of each row, in float32."""
    return custom_call("jinfer_softmax", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def activate(x: Float[Array, "rows size"], function: str) -> Float[Array, "rows size"]:
    """Applies an activation function to each number, in float32.

    Args:
        function: one of `jinfer.cpu.matmul_call.ACTIVATIONS`.
    """
    call = custom_call("jinfer_activate", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, activation=np.int64(ACTIVATIONS.index(function)))


def argmax(x: Float[Array, "rows size"]) -> Int[Array, " rows"]:
    """Returns the first index of each row's largest number; the last index if the row has NaN."""
    return custom_call("jinfer_argmax", jax.ShapeDtypeStruct(x.shape[:1], np.int32))(x)

"""Norms, softmax and sigmoid of rows as custom calls.

A row's result is the same to the bit whatever other rows there are; XLA's own sums over the last
axis are cut into other parts from some thousand numbers on.
"""

from __future__ import annotations

import jax
import numpy as np
from jax import Array
from jaxtyping import Float

from jinfer.cpu import build


def available() -> bool:
    """Whether the custom calls exist on this machine; compiles them the first time."""
    return build.register("jinfer_norm", "jinfer_scores")


def norm(
    x: Float[Array, "rows size"],
    weight: Float[Array, "groups size"] | None,
    bias: Float[Array, "groups size"] | None,
    *,
    centered: bool,
    eps: float,
    offset: float,
) -> Float[Array, "rows size"]:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * (weight + offset) + bias, all float32.

    Args:
        weight, bias: row i takes number i % groups of them; None: 1 and 0.
        centered: False for mean = 0.
    """
    vectors = [vector for vector in (weight, bias) if vector is not None]
    return jax.ffi.ffi_call("jinfer_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))(
        x,
        *vectors,
        centered=centered,
        weighted=weight is not None,
        biased=bias is not None,
        eps=np.float32(eps),
        offset=np.float32(offset),
    )


def softmax(x: Float[Array, "rows size"]) -> Float[Array, "rows size"]:
    """Of each row, in float32."""
    return _scores(x, True)


def sigmoid(x: Float[Array, "rows size"]) -> Float[Array, "rows size"]:
    """Of each number, in float32."""
    return _scores(x, False)


def _scores(x: Array, softmax: bool) -> Array:
    call = jax.ffi.ffi_call("jinfer_scores", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, softmax=softmax)

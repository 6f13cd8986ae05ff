"""Dense projections."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float


def linear(
    x: Float[Array, "*rows inputs"],
    weight: Float[Array, "outputs inputs"],
    bias: Float[Array, " outputs"] | None = None,
) -> Float[Array, "*rows outputs"]:
    """x @ weight.T + bias, accumulated in float32, in x's type.

    Weights stay [outputs, inputs], as files store them: on XLA:CPU this is as fast as the
    transposed layout, and loading copies nothing.
    """
    contracted = (((x.ndim - 1,), (1,)), ((), ()))
    y = lax.dot_general(x, weight, contracted, preferred_element_type=jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + bias.shape)
    return y.astype(x.dtype)

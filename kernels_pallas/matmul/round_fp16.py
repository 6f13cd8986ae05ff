"""Rounding activations to fp16 with a power-of-two scale per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

if TYPE_CHECKING:
    from jaxtyping import Float

_LARGEST = 512.0  # magnitude of a row, so that neither it nor its small numbers leave fp16's range


def round_rows(
    x: Float[Array, "rows inputs"],
) -> tuple[Float[Array, "rows inputs"], Float[Array, " rows"]]:
    """Rounds x to fp16; returns it and the power of two that divided each row."""
    x = x.astype(jnp.float32)
    factor = row_scale(jnp.max(jnp.abs(x), axis=1))
    return (x / factor[:, None]).astype(jnp.float16), factor


def rounded_matmul(
    x: Float[Array, "rows inputs"], weights: Float[Array, "outputs inputs"]
) -> Float[Array, "rows outputs"]:
    """Computes x @ weights.T in XLA, x rounded and weights in fp16, accumulated in float32."""
    x16, factors = round_rows(x)
    contracted = (((1,), (1,)), ((), ()))
    y = lax.dot_general(x16, weights, contracted, preferred_element_type=jnp.float32)
    return y * factors[:, None]


def row_scale(highest: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Returns the power of two that divides rows with these maximum magnitudes."""
    exponent = lax.bitcast_convert_type(highest, jnp.uint32) & np.uint32(0x7F800000)
    power = lax.bitcast_convert_type(exponent, jnp.float32)
    return jnp.where(power > 0, power, np.float32(1)) / np.float32(_LARGEST)

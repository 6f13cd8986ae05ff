"""The other factor in fp16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax

if TYPE_CHECKING:
    from jaxtyping import Float

_LARGEST = 512.0  # magnitude of a row, so that neither it nor its small numbers leave fp16's range


def rounded(
    x: Float[Array, "rows inputs"],
) -> tuple[Float[Array, "rows inputs"], Float[Array, " rows"]]:
    """x in fp16, and the power of two that each row was divided by to stay in its range."""
    x = x.astype(jnp.float32)
    highest = jnp.max(jnp.abs(x), axis=1)
    exponent = lax.bitcast_convert_type(highest, jnp.uint32) & jnp.uint32(0x7F800000)
    power = lax.bitcast_convert_type(exponent, jnp.float32)
    factor = jnp.where(power > 0, power, jnp.float32(1)) / jnp.float32(_LARGEST)
    return (x / factor[:, None]).astype(jnp.float16), factor

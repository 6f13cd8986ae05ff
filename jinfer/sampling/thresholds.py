"""Top-k and top-p thresholds over a vocabulary, without sorting it.

By bisection over the bits of the numbers, 32 sums over the vocabulary, which XLA:CPU computes
several times faster than a sort. On a GPU kernels do it, four bits at once
(`kernels_pallas.topk_threshold`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax

from jinfer.ops import reductions

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt

_LEAST_MASS = 1e-30


def top_values(
    x: Float[Array, "rows vocab"], count: Int[Array, " rows"]
) -> Bool[Array, "rows vocab"]:
    """Which numbers are among the `count` greatest; all that equal the last of them are."""
    order = ordered_bits(x)
    count = jnp.clip(count, 1, x.shape[-1])
    if reductions.has_mass_threshold():
        least = reductions.mass_threshold(order, jnp.ones_like(x), count.astype(x.dtype))
    else:
        least = bisect_max(
            lambda bits: jnp.sum(order >= bits[:, None], axis=-1, dtype=jnp.int32) >= count,
            count.shape,
        )
    return order >= least[:, None]


def top_mass(
    x: Float[Array, "rows vocab"],
    weights: Float[Array, "rows vocab"],
    mass: Float[Array, " rows"],
) -> Bool[Array, "rows vocab"]:
    """Which numbers are among the greatest that together have this mass.

    All that equal the last of them are, and the greatest with a weight always is.
    """
    order = ordered_bits(x)
    # Without a bound a tiny mass would keep not even the first.
    mass = jnp.maximum(mass, _LEAST_MASS)
    if reductions.has_mass_threshold():
        return order >= reductions.mass_threshold(order, weights, mass)[:, None]

    def enough(bits: UInt[Array, " rows"]) -> Bool[Array, " rows"]:
        return jnp.sum(jnp.where(order >= bits[:, None], weights, 0.0), axis=-1) >= mass

    return order >= bisect_max(enough, mass.shape)[:, None]


def bisect_max(
    holds: Callable[[UInt[Array, " rows"]], Bool[Array, " rows"]],
    shape: tuple[int, ...],
    bits: int = 32,
) -> UInt[Array, " rows"]:
    """The largest integer for which a monotonic condition holds; it holds for 0."""

    def try_bit(i: Array, so_far: Array) -> Array:
        higher = so_far | (jnp.uint32(1) << (jnp.uint32(bits - 1) - i.astype(jnp.uint32)))
        return jnp.where(holds(higher), higher, so_far)

    return lax.fori_loop(0, bits, try_bit, jnp.zeros(shape, jnp.uint32))


def ordered_bits(x: Float[Array, "rows vocab"]) -> UInt[Array, "rows vocab"]:
    """Integers in the same order as the floats; 0 and -0 are the same."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits & sign != 0, jnp.uint32(0) - bits, bits | sign)

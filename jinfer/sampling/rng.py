"""Random numbers: a counter-based generator, so that a seed's tokens depend on no other request.

Token i is the likeliest after Gumbel noise of `fold_in(key, i)` is added. Speculative decoding
relies on it: the seed and i determine the noise. Stages that draw random numbers of their own hash
other words with the key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.random import threefry_2x32

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt


# The first of the two words that are hashed with a key; `fold_in` has 0 there.
_STREAMS = {"xtc": 1, "random_fsd": 2}


def noise(
    key: UInt[Array, "rows 2"], drawn: Int[Array, " rows"], vocab: int
) -> Float[Array, "rows vocab"]:
    """Draws Gumbel noise for the answer's token number `drawn`."""

    def of_row(key: Array, drawn: Array) -> Array:
        wrapped = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(wrapped, drawn), (vocab,), jnp.float32)

    return jax.vmap(of_row)(key, drawn)


def uniform(
    key: UInt[Array, "rows 2"], drawn: Int[Array, " rows"], sampler: Literal["xtc", "random_fsd"]
) -> Float[Array, " rows"]:
    """Draws uniform numbers in [0, 1) for a sampler's own decision."""
    stream = jnp.full_like(drawn, _STREAMS[sampler])

    def of_row(key: Array, words: Array) -> Array:
        return threefry_2x32(key, words)[0]

    words = jnp.stack([stream, drawn], axis=-1).astype(jnp.uint32)
    bits = jax.vmap(of_row)(key, words)
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)

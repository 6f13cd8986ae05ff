"""What a request's seed gives: for each of its tokens the same, whoever shares the batch.

Token i is the likeliest after Gumbel noise of `fold_in(key, i)` is added. Speculation stands on
that: whoever knows the seed and i knows the noise. Stages that need chance of their own take it
from other folds of the key, which no token's number reaches.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, UInt

# Tokens are counted with 31 bits.
_STREAMS = {"xtc": 2**32 - 1, "random_fsd": 2**32 - 2}


def noise(
    key: UInt[Array, "rows 2"], drawn: Int[Array, " rows"], vocab: int
) -> Float[Array, "rows vocab"]:
    """Gumbel noise for the token after `drawn` others."""

    def one(key: Array, drawn: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(_wrapped(key), drawn), (vocab,), jnp.float32)

    return jax.vmap(one)(key, drawn)


def chance(
    key: UInt[Array, "rows 2"], drawn: Int[Array, " rows"], stage: Literal["xtc", "random_fsd"]
) -> Float[Array, " rows"]:
    """A number from 0 to below 1 for a stage's own decision."""

    def one(key: Array, drawn: Array) -> Array:
        stream = jax.random.fold_in(_wrapped(key), jnp.uint32(_STREAMS[stage]))
        return jax.random.uniform(jax.random.fold_in(stream, drawn), (), jnp.float32)

    return jax.vmap(one)(key, drawn)


def _wrapped(key: Array) -> Array:
    return jax.random.wrap_key_data(key, impl="threefry2x32")

"""Temperature: fixed, or dynamic by the distribution's entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.sampling.sampling_metadata import SamplerContext

if TYPE_CHECKING:
    from jaxtyping import Float

_COLDEST = 1e-37  # below it float32 has only a few numbers left


def temperature(
    x: Float[Array, "rows vocab"], context: SamplerContext
) -> Float[Array, "rows vocab"]:
    """Divides logits, less the greatest, by the temperature."""
    return _divided(x, context.metadata.column("temperature"))


def dynatemp(x: Float[Array, "rows vocab"], context: SamplerContext) -> Float[Array, "rows vocab"]:
    """Dynamic temperature (llama.cpp's `temp_ext`).

    From temperature - range, for a distribution of no entropy, to temperature + range, for a flat
    distribution over the tokens that are left; between them it follows the entropy's share of the
    greatest, to the power of the exponent.
    """
    base, spread = context.metadata.column("temperature"), context.metadata.column("dynatemp_range")
    count = jnp.sum(x > -jnp.inf, axis=-1, dtype=jnp.float32)
    share = entropy(jax.nn.log_softmax(x, axis=-1)) / jnp.log(count)
    coldest = jnp.maximum(base - spread, 0.0)
    power = jnp.clip(share, 0.0, 1.0) ** context.metadata.column("dynatemp_exponent")
    dynamic = coldest + (base + spread - coldest) * power
    # For a single token the share is 0 / 0, and the temperature makes no difference.
    return _divided(x, jnp.where(jnp.isfinite(dynamic), dynamic, base))


def _divided(x: Float[Array, "rows vocab"], divisor: Float[Array, " rows"]) -> Array:
    # Below the likeliest, so that a tiny temperature leads to -inf and never to inf.
    below = x - jnp.max(x, axis=-1, keepdims=True)
    return below / jnp.maximum(divisor, _COLDEST)[:, None]


def entropy(logprobs: Float[Array, "rows vocab"]) -> Float[Array, " rows"]:
    """Entropy in nats; tokens without probability add nothing."""
    parts = jnp.exp(logprobs) * logprobs
    return -jnp.sum(jnp.where(logprobs > -jnp.inf, parts, 0.0), axis=-1)

"""The temperature, fixed or following the entropy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jinfer.sampling.history import History
from jinfer.sampling.rows import Progress, Sampler


def temperature(
    x: Float[Array, "rows vocab"], sampler: Sampler, progress: Progress, history: History
) -> Float[Array, "rows vocab"]:
    """Logits below the likeliest, divided by the temperature.

    Dynamic temperature (llama.cpp's `temp_ext`): from scale - range, for a distribution of no
    entropy, to scale + range, for one that is flat over the tokens there are; between them it
    follows the entropy's share of the greatest, to the power of the exponent.
    """
    del progress, history
    scale, spread = sampler.number("scale"), sampler.number("dynatemp_range")
    # Below the likeliest, so that a tiny temperature leads to -inf and never to inf.
    below = x - jnp.max(x, axis=-1, keepdims=True)
    logprobs = jax.nn.log_softmax(below, axis=-1)
    share = entropy(logprobs) / jnp.log(jnp.sum(x > -jnp.inf, axis=-1, dtype=jnp.float32))
    coldest = jnp.maximum(scale - spread, 0.0)
    power = jnp.clip(share, 0.0, 1.0) ** sampler.number("dynatemp_exponent")
    dynamic = coldest + (scale + spread - coldest) * power
    # Of a single token the entropy's share is 0 / 0, and its temperature makes no difference.
    usable = (spread > 0) & jnp.isfinite(dynamic)
    return below / jnp.maximum(jnp.where(usable, dynamic, scale), 1e-37)[:, None]


def entropy(logprobs: Float[Array, "rows vocab"]) -> Float[Array, " rows"]:
    """In nats; what has no probability adds nothing."""
    parts = jnp.exp(logprobs) * logprobs
    return -jnp.sum(jnp.where(logprobs > -jnp.inf, parts, 0.0), axis=-1)

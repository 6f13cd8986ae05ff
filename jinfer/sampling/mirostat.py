"""Mirostat (arXiv 2007.14966): a bound on surprise, adapted until the surprise is as requested."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.sampling.sampling_metadata import SamplerContext, SamplingMetadata
from jinfer.sampling.thresholds import top_values

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_LN2 = 0.6931471805599453
_FITTED = 100  # likeliest tokens that version 1 fits Zipf's law to


def mirostat(x: Float[Array, "rows vocab"], context: SamplerContext) -> Float[Array, "rows vocab"]:
    """Log-probabilities, -inf for tokens of too much surprise; the likeliest always stays.

    Version 2 drops what has more than mu bits of surprise. Version 1 keeps the k likeliest, where
    k is the number whose mean surprise would be mu if the distribution followed Zipf's law.
    """
    mu, version = context.state.mu, context.metadata.column("mirostat")
    logprobs = jax.nn.log_softmax(x, axis=-1)
    likeliest = logprobs >= jnp.max(logprobs, axis=-1, keepdims=True)
    second = likeliest | (logprobs >= -_LN2 * mu[:, None])
    first = lax.cond(
        jnp.any(version == 1),
        lambda: top_values(logprobs, _zipf_k(logprobs, mu)),
        lambda: second,
    )
    kept = jnp.where((version == 1)[:, None], first, second)
    return jnp.where(kept, logprobs, -jnp.inf)


def adapted_mu(
    metadata: SamplingMetadata, mu: Array, logprob: Float[Array, " rows"]
) -> Float[Array, " rows"]:
    """Mu after a token of this log-probability, before the cut, in nats."""
    error = -logprob / _LN2 - metadata.column("mirostat_tau")
    return jnp.where(
        metadata.column("mirostat") > 0, mu - metadata.column("mirostat_eta") * error, mu
    )


def _zipf_k(logprobs: Float[Array, "rows vocab"], mu: Array) -> Int[Array, " rows"]:
    """k = (e 2^mu / (1 - vocab^-e)) ^ (1/s), where s is fitted to the likeliest and e = s - 1."""
    vocab = logprobs.shape[-1]
    # Without the barrier XLA:CPU turns a top_k that is used in part into a sort.
    best, _ = lax.optimization_barrier(lax.top_k(logprobs, min(_FITTED, vocab)))
    rank = jnp.arange(1, best.shape[-1], dtype=jnp.float32)
    steps = jnp.log((rank + 1) / rank)
    falls = best[:, :-1] - best[:, 1:]
    there = best[:, 1:] > -jnp.inf
    falls, steps = jnp.where(there, falls, 0.0), jnp.where(there, steps, 0.0)
    s = jnp.sum(falls * steps, axis=-1) / jnp.maximum(jnp.sum(steps**2, axis=-1), 1e-30)
    s = jnp.maximum(s, 1e-6)
    e = jnp.where(jnp.abs(s - 1) < 1e-6, 1e-6, s - 1)
    size = jnp.log(jnp.float32(vocab))
    log_k = (jnp.log(e / -jnp.expm1(-e * size)) + mu * _LN2) / s
    return jnp.exp(jnp.clip(log_k, 0.0, size)).astype(jnp.int32)

"""Truncation samplers (top-k, top-p, min-p, ...): each returns logits with -inf for what it drops.

All keep every token that equals the last one kept, so no order among equals is needed; only
tail-free sampling sorts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.sampling.rng import uniform
from jinfer.sampling.samplers import SAMPLER_NAMES
from jinfer.sampling.sampling_metadata import SamplerContext
from jinfer.sampling.temperature import entropy
from jinfer.sampling.thresholds import bisect_max, top_mass

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

type Logits = Float[Array, "rows vocab"]


def top_k_top_p(x: Logits, context: SamplerContext) -> Logits:
    """top_k, top_p and typical_p: the first tokens by some order that reach some mass.

    top_k (arXiv 1805.04833): the likeliest, that many. top_p (arXiv 1904.09751): the
    likeliest, of this probability. typical_p (arXiv 2202.00666): those whose surprise is nearest
    to the expected one, of this probability.
    """
    top_k = context.number == SAMPLER_NAMES.index("top_k")
    typical = context.number == SAMPLER_NAMES.index("typical_p")
    order, weights = lax.cond(typical, _surprise, lambda x: (x, _weights(x)), x)
    weights = jnp.where(top_k, 1.0, weights)
    metadata = context.metadata
    share = jnp.where(typical, metadata.column("typical_p"), metadata.column("top_p"))
    count = jnp.minimum(metadata.column("top_k"), x.shape[-1]).astype(jnp.float32)
    mass = jnp.where(top_k, count, share * jnp.sum(weights, axis=-1))
    return _keep(x, top_mass(order, weights, mass))


def _surprise(x: Logits) -> tuple[Array, Array]:
    """The negative distance of each token's surprise from the expected one, and its probability."""
    logprobs = jax.nn.log_softmax(x, axis=-1)
    return -jnp.abs(logprobs + entropy(logprobs)[:, None]), jnp.exp(logprobs)


def min_p_top_a(x: Logits, context: SamplerContext) -> Logits:
    """min_p and top_a: the tokens of at least a probability that depends on the greatest, p.

    min_p (arXiv 2407.01082): min_p * p. top_a (BlinkDL, 2022): top_a * p^2.
    """
    weights = _weights(x)
    # With p = 1 / total, top_a * p^2 is top_a / total in units of p.
    top_a = context.metadata.column("top_a") / jnp.sum(weights, axis=-1)
    squared = context.number == SAMPLER_NAMES.index("top_a")
    least = jnp.where(squared, top_a, context.metadata.column("min_p"))
    return _keep(x, weights >= least[:, None])


def tfs_z(x: Logits, context: SamplerContext) -> Logits:
    """Tail-free sampling (Phenix and Egan, 2019): probabilities up to where they flatten.

    Of the sorted probabilities' second differences, without their signs, the first ones are taken
    while their sum is at most this share of all; one token more than so many stays.
    """
    ordered = jnp.flip(jnp.sort(x, axis=-1), axis=-1)
    p = jax.nn.softmax(ordered, axis=-1)
    slope = p[:, :-1] - p[:, 1:]
    curve = jnp.abs(slope[:, :-1] - slope[:, 1:])
    most = context.metadata.column("tfs_z") * jnp.sum(curve, axis=-1)
    place = jnp.arange(curve.shape[-1], dtype=jnp.uint32)[None]

    def within(count: Array) -> Array:
        first = jnp.where(place < count[:, None], curve, 0.0)
        return jnp.sum(first, axis=-1) <= most

    bits = max(1, x.shape[-1].bit_length())
    last = jnp.minimum(bisect_max(within, most.shape, bits), jnp.uint32(x.shape[-1] - 1))
    least = jnp.take_along_axis(ordered, last[:, None].astype(jnp.int32), axis=-1)
    return _keep(x, x >= least)


def top_n_sigma(x: Logits, context: SamplerContext) -> Logits:
    """Logits at most n standard deviations below the greatest (arXiv 2411.07641).

    The deviation is that of the tokens not dropped yet. A temperature, before or after, changes
    nothing.
    """
    finite = x > -jnp.inf
    count = jnp.sum(finite, axis=-1, keepdims=True, dtype=jnp.float32)
    mean = jnp.sum(jnp.where(finite, x, 0.0), axis=-1, keepdims=True) / count
    variance = jnp.sum(jnp.where(finite, (x - mean) ** 2, 0.0), axis=-1, keepdims=True) / count
    reach = context.metadata.column("top_n_sigma")[:, None] * jnp.sqrt(variance)
    return _keep(x, x >= jnp.max(x, axis=-1, keepdims=True) - reach)


def xtc(x: Logits, context: SamplerContext) -> Logits:
    """XTC, exclude top choices (p-e-w, 2024): at times only the least likely of the likely tokens.

    With the probability `xtc_probability` all tokens of at least `xtc_threshold` are dropped but
    the least likely of them.
    """
    u = uniform(context.metadata.key, context.state.drawn, "xtc")
    now = u < context.metadata.column("xtc_probability")
    p = jax.nn.softmax(x, axis=-1)
    # What was dropped before is not likely, even where the threshold is 0.
    likely = (p >= context.metadata.column("xtc_threshold")[:, None]) & (x > -jnp.inf)
    least = jnp.min(jnp.where(likely, p, jnp.inf), axis=-1, keepdims=True)
    return _keep(x, ~likely | (p <= least) | ~now[:, None])


def _weights(x: Logits) -> Float[Array, "rows vocab"]:
    """Probabilities in units of the greatest."""
    return jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))


def _keep(x: Logits, which: Bool[Array, "rows vocab"]) -> Logits:
    return jnp.where(which, x, -jnp.inf)

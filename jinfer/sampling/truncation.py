"""Temperature and truncation samplers (top-k, top-p, min-p, mirostat, ...); dropped: -inf.

All keep every token that equals the last kept token, so ties need no order. Thresholds are found
without a sort, by bisection over the bits of the numbers: 32 sums over the vocabulary, which
XLA:CPU computes several times faster than a sort. On a GPU kernels find them, four bits at once
(`kernels_pallas.topk_threshold`). Only tail-free sampling sorts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.ops import reductions
from jinfer.sampling.rng import uniform
from jinfer.sampling.samplers import SAMPLER_NAMES
from jinfer.sampling.sampling_metadata import SamplerContext, SamplingMetadata

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt

_COLDEST = 1e-37  # minimum: float32 has few numbers below


def temperature(
    x: Float[Array, "rows vocab"], context: SamplerContext
) -> Float[Array, "rows vocab"]:
    """Divides logits, minus the greatest, by the temperature."""
    return _divided(x, context.metadata.column("temperature"))


def dynatemp(x: Float[Array, "rows vocab"], context: SamplerContext) -> Float[Array, "rows vocab"]:
    """Dynamic temperature (llama.cpp's `temp_ext`).

    It rises from temperature - range at entropy 0 to temperature + range for a flat distribution;
    between them it follows entropy / maximum entropy, to the power of the exponent.
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
    # Relative to the likeliest, so that a tiny temperature gives -inf and never inf.
    below = x - jnp.max(x, axis=-1, keepdims=True)
    return below / jnp.maximum(divisor, _COLDEST)[:, None]


def entropy(logprobs: Float[Array, "rows vocab"]) -> Float[Array, " rows"]:
    """Computes the entropy in nats; tokens of probability 0 add nothing."""
    parts = jnp.exp(logprobs) * logprobs
    return -jnp.sum(jnp.where(logprobs > -jnp.inf, parts, 0.0), axis=-1)


_LEAST_MASS = 1e-30


def top_values(
    x: Float[Array, "rows vocab"], count: Int[Array, " rows"]
) -> Bool[Array, "rows vocab"]:
    """Marks the `count` greatest numbers, and all that equal the last of them."""
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
    """Marks the greatest numbers that together have this mass.

    Numbers equal to the last are marked too, and the greatest with a weight always is.
    """
    order = ordered_bits(x)
    # Without a minimum a tiny mass would keep no token.
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
    """Finds the largest integer for which a monotonic condition holds; it holds for 0."""

    def try_bit(i: Array, so_far: Array) -> Array:
        higher = so_far | (jnp.uint32(1) << (jnp.uint32(bits - 1) - i.astype(jnp.uint32)))
        return jnp.where(holds(higher), higher, so_far)

    return lax.fori_loop(0, bits, try_bit, jnp.zeros(shape, jnp.uint32))


def ordered_bits(x: Float[Array, "rows vocab"]) -> UInt[Array, "rows vocab"]:
    """Maps floats to integers of the same order; 0 and -0 are equal."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits & sign != 0, jnp.uint32(0) - bits, bits | sign)


_LN2 = 0.6931471805599453
_FITTED = 100  # likeliest tokens that version 1 fits Zipf's law to


def mirostat(x: Float[Array, "rows vocab"], context: SamplerContext) -> Float[Array, "rows vocab"]:
    """Mirostat (arXiv 2007.14966): drops tokens of too much surprise; the likeliest always stays.

    Returns log-probabilities. Version 2 drops tokens of more than mu bits of surprise. Version 1
    keeps the k likeliest, where k gives a mean surprise of mu if the distribution follows Zipf's
    law.
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
    """Returns mu after a token of this log-probability before truncation, in nats."""
    error = -logprob / _LN2 - metadata.column("mirostat_tau")
    return jnp.where(
        metadata.column("mirostat") > 0, mu - metadata.column("mirostat_eta") * error, mu
    )


def _zipf_k(logprobs: Float[Array, "rows vocab"], mu: Array) -> Int[Array, " rows"]:
    """Computes k = (e 2^mu / (1 - vocab^-e)) ^ (1/s), s fitted to the likeliest, e = s - 1."""
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


type Logits = Float[Array, "rows vocab"]


def top_k_top_p(x: Logits, context: SamplerContext) -> Logits:
    """Keeps the first tokens by some order that reach some mass: top_k, top_p, typical_p.

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
    """Returns each token's negative distance from the expected surprise, and its probability."""
    logprobs = jax.nn.log_softmax(x, axis=-1)
    return -jnp.abs(logprobs + entropy(logprobs)[:, None]), jnp.exp(logprobs)


def min_p_top_a(x: Logits, context: SamplerContext) -> Logits:
    """Keeps tokens of at least a probability that depends on the greatest, p: min_p, top_a.

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
    mass_limit = context.metadata.column("tfs_z") * jnp.sum(curve, axis=-1)
    place = jnp.arange(curve.shape[-1], dtype=jnp.uint32)[None]

    def within(count: Array) -> Array:
        first = jnp.where(place < count[:, None], curve, 0.0)
        return jnp.sum(first, axis=-1) <= mass_limit

    bits = max(1, x.shape[-1].bit_length())
    last = jnp.minimum(bisect_max(within, mass_limit.shape, bits), jnp.uint32(x.shape[-1] - 1))
    least = jnp.take_along_axis(ordered, last[:, None].astype(jnp.int32), axis=-1)
    return _keep(x, x >= least)


def top_n_sigma(x: Logits, context: SamplerContext) -> Logits:
    """Keeps logits at most n standard deviations below the greatest (arXiv 2411.07641).

    The deviation is that of the tokens not dropped yet. It is invariant to temperature.
    """
    finite = x > -jnp.inf
    count = jnp.sum(finite, axis=-1, keepdims=True, dtype=jnp.float32)
    mean = jnp.sum(jnp.where(finite, x, 0.0), axis=-1, keepdims=True) / count
    variance = jnp.sum(jnp.where(finite, (x - mean) ** 2, 0.0), axis=-1, keepdims=True) / count
    reach = context.metadata.column("top_n_sigma")[:, None] * jnp.sqrt(variance)
    return _keep(x, x >= jnp.max(x, axis=-1, keepdims=True) - reach)


def xtc(x: Logits, context: SamplerContext) -> Logits:
    """XTC, exclude top choices (p-e-w, 2024): at times drops likely tokens but the least likely.

    With the probability `xtc_probability` all tokens of at least `xtc_threshold` are dropped but
    the least likely of them.
    """
    u = uniform(context.metadata.key, context.state.drawn, "xtc")
    now = u < context.metadata.column("xtc_probability")
    p = jax.nn.softmax(x, axis=-1)
    # Dropped tokens are not likely, even if the threshold is 0.
    likely = (p >= context.metadata.column("xtc_threshold")[:, None]) & (x > -jnp.inf)
    least = jnp.min(jnp.where(likely, p, jnp.inf), axis=-1, keepdims=True)
    return _keep(x, ~likely | (p <= least) | ~now[:, None])


def _weights(x: Logits) -> Float[Array, "rows vocab"]:
    """Computes probabilities in units of the greatest."""
    return jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))


def _keep(x: Logits, which: Bool[Array, "rows vocab"]) -> Logits:
    return jnp.where(which, x, -jnp.inf)

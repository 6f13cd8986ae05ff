"""Filters: each gives the logits back with -inf for what it drops.

All keep what equals the last token kept, so that no order among equals is needed; only tail-free
sampling sorts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jinfer.sampling.chance import chance
from jinfer.sampling.history import History
from jinfer.sampling.rows import Progress, Sampler
from jinfer.sampling.search import greatest, heaviest, largest
from jinfer.sampling.temperature import entropy

type Logits = Float[Array, "rows vocab"]


def top_k(x: Logits, sampler: Sampler, progress: Progress, history: History) -> Logits:
    """The k likeliest (arXiv 1805.04833)."""
    del progress, history
    return _kept(x, greatest(x, sampler.whole("top_k")))


def top_p(x: Logits, sampler: Sampler, progress: Progress, history: History) -> Logits:
    """The likeliest that together have this probability (arXiv 1904.09751)."""
    del progress, history
    return _kept(x, heaviest(x, _weights(x), sampler.number("top_p")))


def min_p(x: Logits, sampler: Sampler, progress: Progress, history: History) -> Logits:
    """What has at least this share of the likeliest's probability (arXiv 2407.01082)."""
    del progress, history
    return _kept(x, _weights(x) >= sampler.number("min_p")[:, None])


def typical_p(x: Logits, sampler: Sampler, progress: Progress, history: History) -> Logits:
    """What surprises nearest to the expected, up to this probability (arXiv 2202.00666)."""
    del progress, history
    logprobs = jax.nn.log_softmax(x, axis=-1)
    away = jnp.abs(logprobs + entropy(logprobs)[:, None])
    return _kept(x, heaviest(-away, jnp.exp(logprobs), sampler.number("typical_p")))


def tfs_z(x: Logits, sampler: Sampler, progress: Progress, history: History) -> Logits:
    """Tail-free sampling (Phenix and Egan, 2019): probabilities up to where they flatten.

    Of the sorted probabilities' second differences, without their signs, the first ones are taken
    while their sum is at most this share of all; one token more than so many stays.
    """
    del progress, history
    ordered = jnp.flip(jnp.sort(x, axis=-1), axis=-1)
    p = jax.nn.softmax(ordered, axis=-1)
    slope = p[:, :-1] - p[:, 1:]
    curve = jnp.abs(slope[:, :-1] - slope[:, 1:])
    most = sampler.number("tfs_z") * jnp.sum(curve, axis=-1)
    place = jnp.arange(curve.shape[-1], dtype=jnp.uint32)[None]

    def within(count: Array) -> Array:
        first = jnp.where(place < count[:, None], curve, 0.0)
        return jnp.sum(first, axis=-1) <= most

    bits = max(1, x.shape[-1].bit_length())
    last = jnp.minimum(largest(within, most.shape, bits), jnp.uint32(x.shape[-1] - 1))
    least = jnp.take_along_axis(ordered, last[:, None].astype(jnp.int32), axis=-1)
    return _kept(x, x >= least)


def top_a(x: Logits, sampler: Sampler, progress: Progress, history: History) -> Logits:
    """What has at least this times the square of the likeliest's probability (BlinkDL, 2022)."""
    del progress, history
    p = jax.nn.softmax(x, axis=-1)
    highest = jnp.max(p, axis=-1, keepdims=True)
    return _kept(x, p >= sampler.number("top_a")[:, None] * highest**2)


def top_n_sigma(x: Logits, sampler: Sampler, progress: Progress, history: History) -> Logits:
    """Logits at most n standard deviations below the greatest (arXiv 2411.07641).

    The deviation is that of the tokens there are. A temperature, before or after, changes nothing.
    """
    del progress, history
    there = x > -jnp.inf
    count = jnp.sum(there, axis=-1, keepdims=True, dtype=jnp.float32)
    mean = jnp.sum(jnp.where(there, x, 0.0), axis=-1, keepdims=True) / count
    variance = jnp.sum(jnp.where(there, (x - mean) ** 2, 0.0), axis=-1, keepdims=True) / count
    reach = sampler.number("top_n_sigma")[:, None] * jnp.sqrt(variance)
    return _kept(x, x >= jnp.max(x, axis=-1, keepdims=True) - reach)


def xtc(x: Logits, sampler: Sampler, progress: Progress, history: History) -> Logits:
    """Exclude top choices (p-e-w, 2024): now and then, only the least likely of the likely ones.

    With the probability `xtc_probability` all tokens of at least `xtc_threshold` are dropped but
    the least likely of them.
    """
    del history
    now = chance(sampler.key, progress.drawn, "xtc") < sampler.number("xtc_probability")
    p = jax.nn.softmax(x, axis=-1)
    likely = p >= sampler.number("xtc_threshold")[:, None]
    least = jnp.min(jnp.where(likely, p, jnp.inf), axis=-1, keepdims=True)
    return _kept(x, ~likely | (p <= least) | ~now[:, None])


def _weights(x: Logits) -> Float[Array, "rows vocab"]:
    """Probabilities in units of the greatest."""
    return jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))


def _kept(x: Logits, which: Bool[Array, "rows vocab"]) -> Logits:
    return jnp.where(which, x, -jnp.inf)

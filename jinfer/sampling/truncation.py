"""Filters: each gives the logits back with -inf for what it drops.

All keep what equals the last token kept, so that no order among equals is needed; only tail-free
sampling sorts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.sampling.param_names import STAGES
from jinfer.sampling.rng import chance
from jinfer.sampling.sampling_metadata import Turn
from jinfer.sampling.temperature import entropy
from jinfer.sampling.thresholds import heaviest, largest

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

type Logits = Float[Array, "rows vocab"]


def by_mass(x: Logits, turn: Turn) -> Logits:
    """The first tokens, by an order, that together have a share of a weight.

    top_k (arXiv 1805.04833): the likeliest, as many as asked. top_p (arXiv 1904.09751): the
    likeliest, of this probability. typical_p (arXiv 2202.00666): those whose surprise is nearest
    to the expected one, of this probability.
    """
    top_k, typical = turn.stage == STAGES.index("top_k"), turn.stage == STAGES.index("typical_p")
    order, weights = lax.cond(typical, _surprise, lambda x: (x, _weights(x)), x)
    weights = jnp.where(top_k, 1.0, weights)
    sampler = turn.sampler
    share = jnp.where(typical, sampler.number("typical_p"), sampler.number("top_p"))
    count = jnp.minimum(sampler.whole("top_k"), x.shape[-1]).astype(jnp.float32)
    mass = jnp.where(top_k, count, share * jnp.sum(weights, axis=-1))
    return _kept(x, heaviest(order, weights, mass))


def _surprise(x: Logits) -> tuple[Array, Array]:
    """How near each token's surprise is to the expected one, and its probability."""
    logprobs = jax.nn.log_softmax(x, axis=-1)
    return -jnp.abs(logprobs + entropy(logprobs)[:, None]), jnp.exp(logprobs)


def by_share(x: Logits, turn: Turn) -> Logits:
    """The tokens of at least a probability that the likeliest's, p, gives.

    min_p (arXiv 2407.01082): min_p * p. top_a (BlinkDL, 2022): top_a * p^2.
    """
    weights = _weights(x)
    # With p = 1 / total, top_a * p^2 is top_a / total in units of p.
    top_a = turn.sampler.number("top_a") / jnp.sum(weights, axis=-1)
    squared = turn.stage == STAGES.index("top_a")
    least = jnp.where(squared, top_a, turn.sampler.number("min_p"))
    return _kept(x, weights >= least[:, None])


def tfs_z(x: Logits, turn: Turn) -> Logits:
    """Tail-free sampling (Phenix and Egan, 2019): probabilities up to where they flatten.

    Of the sorted probabilities' second differences, without their signs, the first ones are taken
    while their sum is at most this share of all; one token more than so many stays.
    """
    ordered = jnp.flip(jnp.sort(x, axis=-1), axis=-1)
    p = jax.nn.softmax(ordered, axis=-1)
    slope = p[:, :-1] - p[:, 1:]
    curve = jnp.abs(slope[:, :-1] - slope[:, 1:])
    most = turn.sampler.number("tfs_z") * jnp.sum(curve, axis=-1)
    place = jnp.arange(curve.shape[-1], dtype=jnp.uint32)[None]

    def within(count: Array) -> Array:
        first = jnp.where(place < count[:, None], curve, 0.0)
        return jnp.sum(first, axis=-1) <= most

    bits = max(1, x.shape[-1].bit_length())
    last = jnp.minimum(largest(within, most.shape, bits), jnp.uint32(x.shape[-1] - 1))
    least = jnp.take_along_axis(ordered, last[:, None].astype(jnp.int32), axis=-1)
    return _kept(x, x >= least)


def top_n_sigma(x: Logits, turn: Turn) -> Logits:
    """Logits at most n standard deviations below the greatest (arXiv 2411.07641).

    The deviation is that of the tokens there are. A temperature, before or after, changes nothing.
    """
    there = x > -jnp.inf
    count = jnp.sum(there, axis=-1, keepdims=True, dtype=jnp.float32)
    mean = jnp.sum(jnp.where(there, x, 0.0), axis=-1, keepdims=True) / count
    variance = jnp.sum(jnp.where(there, (x - mean) ** 2, 0.0), axis=-1, keepdims=True) / count
    reach = turn.sampler.number("top_n_sigma")[:, None] * jnp.sqrt(variance)
    return _kept(x, x >= jnp.max(x, axis=-1, keepdims=True) - reach)


def xtc(x: Logits, turn: Turn) -> Logits:
    """Exclude top choices (p-e-w, 2024): now and then, only the least likely of the likely ones.

    With the probability `xtc_probability` all tokens of at least `xtc_threshold` are dropped but
    the least likely of them.
    """
    u = chance(turn.sampler.key, turn.progress.drawn, "xtc")
    now = u < turn.sampler.number("xtc_probability")
    p = jax.nn.softmax(x, axis=-1)
    # What was dropped before is not likely, even where the threshold is 0.
    likely = (p >= turn.sampler.number("xtc_threshold")[:, None]) & (x > -jnp.inf)
    least = jnp.min(jnp.where(likely, p, jnp.inf), axis=-1, keepdims=True)
    return _kept(x, ~likely | (p <= least) | ~now[:, None])


def _weights(x: Logits) -> Float[Array, "rows vocab"]:
    """Probabilities in units of the greatest."""
    return jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))


def _kept(x: Logits, which: Bool[Array, "rows vocab"]) -> Logits:
    return jnp.where(which, x, -jnp.inf)

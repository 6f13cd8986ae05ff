"""Contrastive search (arXiv 2202.06417): likely tokens with hidden states unlike earlier ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.sampling.param_types import MAX_CANDIDATES

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def candidates(
    logits: Float[Array, "rows vocab"], count: int = MAX_CANDIDATES
) -> tuple[Int[Array, "rows count"], Float[Array, "rows count"]]:
    """Returns the likeliest tokens and their probabilities, likeliest first."""
    logits = logits.astype(jnp.float32)
    # Without the barrier XLA:CPU turns a top_k that is used in part into a sort.
    best, ids = lax.optimization_barrier(lax.top_k(logits, min(count, logits.shape[-1])))
    return ids, jnp.exp(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def contrastive_choice(
    probabilities: Float[Array, " k"],
    hidden: Float[Array, "k hidden"],
    history: Float[Array, "length hidden"],
    length: Int[Array, ""],
    alpha: Float[Array, ""],
) -> Int[Array, ""]:
    """Returns the candidate with the greatest (1 - alpha) p - alpha * (similarity to the past).

    Args:
        probabilities: the candidates' probabilities; 0: no candidate.
        hidden: last hidden states after each candidate.
        history: last hidden states of the tokens so far; rows after the first `length` are padding.
        alpha: `penalty_alpha`.

    Similarity is the cosine of two hidden states. Of equals the first is taken.
    """
    likeness = jnp.matmul(
        _directions(hidden), _directions(history).T, precision=lax.Precision.HIGHEST
    )
    past = jnp.arange(history.shape[0], dtype=jnp.int32) < length
    worst = jnp.max(jnp.where(past, likeness, -jnp.inf), axis=-1, initial=-1.0)
    scores = (1 - alpha) * probabilities - alpha * worst
    return jnp.argmax(jnp.where(probabilities > 0, scores, -jnp.inf)).astype(jnp.int32)


def _directions(x: Float[Array, "n hidden"]) -> Float[Array, "n hidden"]:
    x = x.astype(jnp.float32)
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)

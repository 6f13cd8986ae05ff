"""Dense attention: scores and pattern as whole arrays, in plain JAX.

Kernels are tested against this definition. Activation taps of scores and pattern compute it too, as
kernels keep neither in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax

from jinfer.matmul_precision import matmul_precision
from jinfer.ops.attention.mask_rules import ScoreRules, attention_mask, modify_scores
from jinfer.ops.backend import needs_derivatives

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def dense_scores(
    q: Float[Array, "batch tokens heads head_dim"],
    k: Float[Array, "batch kv_heads keys head_dim"],
    positions: Int[Array, "batch tokens"],
    last: Int[Array, "batch tokens"],
    rules: ScoreRules,
) -> Float[Array, "batch heads tokens keys"]:
    """Scaled scores with all modifiers, float32; -inf for keys that a query does not see.

    Args:
        k: key j has position j.
        last: the last position each query sees.
    """
    k = jnp.repeat(k, q.shape[2] // k.shape[1], axis=1)
    here = jnp.arange(k.shape[2], dtype=jnp.int32)[None]
    distance = positions[:, :, None] - here[:, None]
    scores = rules.scale * jnp.einsum(
        "bthd,bhkd->bhtk",
        q.astype(k.dtype),
        k,
        precision=matmul_precision(k),
        preferred_element_type=jnp.float32,
    )
    visible = attention_mask(distance, last, here, rules)
    return jnp.where(visible[:, None], modify_scores(scores, distance, rules), -jnp.inf)


def dense_pattern(
    scores: Float[Array, "batch heads tokens keys"], rules: ScoreRules
) -> Float[Array, "batch heads tokens keys"]:
    """The softmax of the scores, with sinks if any; zeros for a query that sees no key."""
    keys = scores.shape[3]
    if rules.sinks is not None:
        sinks = jnp.broadcast_to(rules.sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sinks.astype(jnp.float32)], axis=-1)
    highest = highest_score(scores)[..., None]
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return (weights / jnp.where(total == 0, 1.0, total))[..., :keys]


def highest_score(scores: Float[Array, "*rows keys"]) -> Float[Array, "*rows"]:
    """The maximum that a softmax subtracts: it does not change the result, so it has no derivative.

    The derivative of a maximum divides by the number of scores equal to it. That number is 0 if a
    compiler computes the scores a second time and rounds them differently.
    """
    if needs_derivatives():
        scores = lax.stop_gradient(scores)
    return jnp.max(scores, axis=-1)


def weighted_values(
    pattern: Float[Array, "batch heads tokens keys"],
    v: Float[Array, "batch kv_heads keys value_dim"],
) -> Float[Array, "batch tokens heads value_dim"]:
    """The attention output of a pattern, float32. Values that no query sees may be NaN."""
    seen = jnp.any(pattern != 0, axis=(1, 2))[:, None, :, None]
    v = jnp.where(seen, v.astype(jnp.float32), 0.0)
    v = jnp.repeat(v, pattern.shape[1] // v.shape[1], axis=1)
    return jnp.einsum("bhtk,bhkd->bthd", pattern, v, precision=matmul_precision(v))

"""Which experts of a mixture each row goes to, and with what weight."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax

from jinfer.cpu import moe_call as cpu
from jinfer.modelspec.blocks import MixtureOfExperts
from jinfer.ops.backend import backend
from jinfer.ops.norm import sigmoid, softmax

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def route(
    logits: Float[Array, "rows experts"],
    correction: Float[Array, " experts"] | None,
    rule: MixtureOfExperts,
) -> tuple[Int[Array, "rows top_k"], Float[Array, "rows top_k"]]:
    """Chooses `rule.top_k` experts of each row, by the rule that `rule` describes.

    Args:
        correction: added to the scores for the choice only.
    """
    whole = rule.scoring != "sparsemixer" and rule.groups == rule.top_k_groups
    if whole and backend() == "cpu" and cpu.available():
        return cpu.route(
            logits,
            correction,
            rule.top_k,
            softmax=rule.scoring == "softmax",
            renormalize=rule.renormalize,
            scale=rule.scale,
        )
    return route_reference(logits, correction, rule)


def route_reference(
    logits: Float[Array, "rows experts"],
    correction: Float[Array, " experts"] | None,
    rule: MixtureOfExperts,
) -> tuple[Int[Array, "rows top_k"], Float[Array, "rows top_k"]]:
    """The same in XLA's operations."""
    if rule.scoring == "sparsemixer":
        chosen, weights = _sparsemixer(logits, rule)
    else:
        scores = softmax(logits) if rule.scoring == "softmax" else sigmoid(logits)
        ranked = scores if correction is None else scores + correction[None, :]
        chosen = lax.top_k(_of_best_groups(ranked, rule), rule.top_k)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=1)
    if rule.renormalize:
        # One after the other, which XLA does not change with the number of rows.
        total = reduce(add, (weights[:, i : i + 1] for i in range(rule.top_k)))
        weights = weights / jnp.maximum(total, 1e-20)  # sigmoids can all be 0
    return chosen, weights * rule.scale


def _of_best_groups(
    scores: Float[Array, "rows experts"], rule: MixtureOfExperts
) -> Float[Array, "rows experts"]:
    """The scores, -inf where an expert's group is not among the best (arXiv 2405.04434)."""
    if rule.groups == rule.top_k_groups:
        return scores
    grouped = scores.reshape(scores.shape[0], rule.groups, -1)
    best = lax.top_k(grouped, 1 if rule.group_score == "max" else 2)[0]
    groups = lax.top_k(jnp.sum(best, axis=2), rule.top_k_groups)[1]
    kept = jnp.any(groups[:, :, None] == jnp.arange(rule.groups)[None, None, :], axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


def _sparsemixer(
    logits: Float[Array, "rows experts"], rule: MixtureOfExperts
) -> tuple[Int[Array, "rows top_k"], Float[Array, "rows top_k"]]:
    """One arg-max after the other, each with a softmax of its own (arXiv 2409.12136).

    A score takes part in the softmax if it is near the best one left: their difference is at most
    2 jitter_eps of the greater of the best one and its own magnitude.
    """
    numbers = jnp.arange(rule.experts)[None, :]
    left, chosen, weights = logits, [], []
    for _ in range(rule.top_k):
        best = jnp.max(left, axis=1, keepdims=True)
        pick = jnp.argmax(left, axis=1)
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * rule.jitter_eps
        near = jnp.where(far, -jnp.inf, left)
        share = softmax(near)
        chosen.append(pick)
        weights.append(jnp.take_along_axis(share, pick[:, None], axis=1)[:, 0])
        left = jnp.where(numbers == pick[:, None], -jnp.inf, left)
    return jnp.stack(chosen, axis=1), jnp.stack(weights, axis=1)

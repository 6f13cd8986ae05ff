"""Mixture of experts (MoE) routing: the top-k experts of each token and their weights."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax

from jinfer.cpu import moe_call as cpu
from jinfer.modelspec.feed_forward_blocks import MoESpec
from jinfer.ops.activation import activate
from jinfer.ops.backend import has_cpu_calls
from jinfer.ops.norm import softmax

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def route(
    logits: Float[Array, "rows experts"],
    correction: Float[Array, " experts"] | None,
    rule: MoESpec,
) -> tuple[Int[Array, "rows top_k"], Float[Array, "rows top_k"]]:
    """Chooses `rule.top_k` experts per row, as `rule` describes.

    Args:
        correction: a bias added to the scores, or logits, for the choice only.
    """
    whole = rule.scoring != "sparsemixer" and rule.groups == rule.top_k_groups
    if whole and rule.correction_bias != "logits" and has_cpu_calls():
        return cpu.route(
            logits,
            correction,
            rule.top_k,
            softmax=rule.scoring == "softmax",
            renormalize=rule.renormalize,
            scale=rule.scale,
        )
    if rule.scoring == "sparsemixer":
        chosen, weights = _sparsemixer(logits, rule)
    else:
        scores = softmax(logits) if rule.scoring == "softmax" else activate("sigmoid", logits)
        ranked = logits if rule.correction_bias == "logits" else scores
        ranked = ranked if correction is None else ranked + correction[None, :]
        chosen = lax.top_k(_mask_groups(ranked, rule), rule.top_k)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=1)
    if rule.renormalize:
        # Added in sequence, so that the order does not depend on the number of rows.
        total = reduce(add, (weights[:, i : i + 1] for i in range(rule.top_k)))
        weights = weights / jnp.maximum(total, 1e-20)  # sigmoids can all be 0
    return chosen, weights * rule.scale


def _mask_groups(
    scores: Float[Array, "rows experts"], rule: MoESpec
) -> Float[Array, "rows experts"]:
    """The scores, -inf outside the best groups (group-limited routing, arXiv 2405.04434)."""
    if rule.groups == rule.top_k_groups:
        return scores
    grouped = scores.reshape(scores.shape[0], rule.groups, -1)
    best = lax.top_k(grouped, 1 if rule.group_score == "max" else 2)[0]
    groups = lax.top_k(jnp.sum(best, axis=2), rule.top_k_groups)[1]
    kept = jnp.any(groups[:, :, None] == jnp.arange(rule.groups)[None, None, :], axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


def _sparsemixer(
    logits: Float[Array, "rows experts"], rule: MoESpec
) -> tuple[Int[Array, "rows top_k"], Float[Array, "rows top_k"]]:
    """SparseMixer (arXiv 2409.12136): repeated arg-max, each with its own softmax.

    A score takes part in the softmax if it is close to the best remaining one: they differ by at
    most 2 jitter_eps times the greater of the best score and its own magnitude.
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

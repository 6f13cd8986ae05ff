"""The router of a mixture of experts: which experts a token goes to, and with what weight."""

from __future__ import annotations

from functools import reduce
from operator import add

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from jinfer.cpu import experts as cpu
from jinfer.nn.parameter import parameter
from jinfer.ops.backend import backend
from jinfer.ops.linear import linear
from jinfer.ops.norm import sigmoid, softmax
from jinfer.spec import blocks


class Router(nnx.Module):
    """Scores every expert and chooses the best, in float32: a near tie decides for the whole."""

    def __init__(self, block: blocks.MixtureOfExperts) -> None:
        self.block = block
        shape = (block.experts, block.inputs)
        self.weight = parameter(shape, ("experts", "hidden"), jnp.float32)
        self.bias = _vector(block.experts) if block.router_bias else None
        self.correction = _vector(block.experts) if block.correction_bias else None

    def __call__(
        self, x: Float[Array, "rows hidden"]
    ) -> tuple[Int[Array, "rows top_k"], Float[Array, "rows top_k"]]:
        """The experts of each row and their weights."""
        bias = None if self.bias is None else self.bias[...]
        logits = linear(x.astype(jnp.float32), self.weight[...], bias)
        correction = None if self.correction is None else self.correction[...]
        return route(logits, correction, self.block)


def _vector(size: int) -> nnx.Param:
    return parameter((size,), ("experts",), jnp.float32)


def route(
    logits: Float[Array, "rows experts"],
    correction: Float[Array, " experts"] | None,
    block: blocks.MixtureOfExperts,
) -> tuple[Int[Array, "rows top_k"], Float[Array, "rows top_k"]]:
    """Chooses `block.top_k` experts of each row, by the rule that `block` describes.

    Args:
        correction: added to the scores for the choice only.
    """
    whole = block.scoring != "sparsemixer" and block.groups == block.top_k_groups
    if whole and backend() == "cpu" and cpu.available():
        return cpu.route(
            logits,
            correction,
            block.top_k,
            softmax=block.scoring == "softmax",
            renormalize=block.renormalize,
            scale=block.scale,
        )
    return route_reference(logits, correction, block)


def route_reference(
    logits: Float[Array, "rows experts"],
    correction: Float[Array, " experts"] | None,
    block: blocks.MixtureOfExperts,
) -> tuple[Int[Array, "rows top_k"], Float[Array, "rows top_k"]]:
    """The same in XLA's operations."""
    if block.scoring == "sparsemixer":
        chosen, weights = _sparsemixer(logits, block)
    else:
        scores = softmax(logits) if block.scoring == "softmax" else sigmoid(logits)
        ranked = scores if correction is None else scores + correction[None, :]
        chosen = lax.top_k(_of_best_groups(ranked, block), block.top_k)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=1)
    if block.renormalize:
        # One after the other, which XLA does not change with the number of rows.
        total = reduce(add, (weights[:, i : i + 1] for i in range(block.top_k)))
        weights = weights / jnp.maximum(total, 1e-20)  # sigmoids can all be 0
    return chosen, weights * block.scale


def _of_best_groups(
    scores: Float[Array, "rows experts"], block: blocks.MixtureOfExperts
) -> Float[Array, "rows experts"]:
    """The scores, -inf where an expert's group is not among the best (arXiv 2405.04434)."""
    if block.groups == block.top_k_groups:
        return scores
    grouped = scores.reshape(scores.shape[0], block.groups, -1)
    best = lax.top_k(grouped, 1 if block.group_score == "max" else 2)[0]
    groups = lax.top_k(jnp.sum(best, axis=2), block.top_k_groups)[1]
    kept = jnp.any(groups[:, :, None] == jnp.arange(block.groups)[None, None, :], axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


def _sparsemixer(
    logits: Float[Array, "rows experts"], block: blocks.MixtureOfExperts
) -> tuple[Int[Array, "rows top_k"], Float[Array, "rows top_k"]]:
    """One arg-max after the other, each with a softmax of its own (arXiv 2409.12136).

    A score takes part in the softmax if it is near the best one left: their difference is at most
    2 jitter_eps of the greater of the best one and its own magnitude.
    """
    numbers = jnp.arange(block.experts)[None, :]
    left, chosen, weights = logits, [], []
    for _ in range(block.top_k):
        best = jnp.max(left, axis=1, keepdims=True)
        pick = jnp.argmax(left, axis=1)
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * block.jitter_eps
        near = jnp.where(far, -jnp.inf, left)
        share = softmax(near)
        chosen.append(pick)
        weights.append(jnp.take_along_axis(share, pick[:, None], axis=1)[:, 0])
        left = jnp.where(numbers == pick[:, None], -jnp.inf, left)
    return jnp.stack(chosen, axis=1), jnp.stack(weights, axis=1)

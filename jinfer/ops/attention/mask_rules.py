"""Mask and score rules of attention: which keys a query sees, and what is done to its scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Float, Int


# What is added to the scores, [batch, heads, tokens, keys], from query position minus key position.
Bias = Callable[[Int[Array, "batch tokens keys"]], Float[Array, "batch heads tokens keys"]]


class ScoreRules(NamedTuple):
    """What a query sees, and how its scores are changed.

    A distance is the query's position minus the key's.

    Attributes:
        scale: multiplies the scores.
        softcap: then scores become softcap * tanh(scores / softcap).
        bias: then this is added, of whole texts only...
        by_distance: ...and column distance - lowest of this; distances beyond its ends count as
            the nearest that it has (T5, arXiv 1910.10683)...
        lowest: ...where its first column is for this distance...
        slopes: ...and the distance times this, per head, is subtracted (ALiBi, arXiv 2108.12409).
        window: a query sees only keys less than this far before it, itself included...
        ahead: ...and, where it looks ahead, less than this far after it.
        sinks: a score per head that takes part in the softmax and has no value.
    """

    scale: float
    softcap: float | None = None
    bias: Bias | None = None
    window: int | None = None
    ahead: int | None = None
    sinks: Float[Array, " heads"] | None = None
    slopes: Float[Array, " heads"] | None = None
    by_distance: Float[Array, "heads distances"] | None = None
    lowest: int = 0


def changed(
    scores: Float[Array, "batch heads tokens keys"],
    distance: Int[Array, "batch tokens keys"],
    rules: ScoreRules,
) -> Float[Array, "batch heads tokens keys"]:
    """Scaled scores with all that the rules do to them, but nothing hidden."""
    if rules.softcap is not None:
        scores = rules.softcap * jnp.tanh(scores / rules.softcap)
    if rules.bias is not None:
        scores = scores + rules.bias(distance)
    if rules.by_distance is not None:
        columns = jnp.clip(distance - rules.lowest, 0, rules.by_distance.shape[1] - 1)
        scores = scores + jnp.moveaxis(rules.by_distance[:, columns], 0, 1).astype(jnp.float32)
    if rules.slopes is not None:
        far = distance[:, None].astype(jnp.float32)
        scores = scores - rules.slopes[None, :, None, None] * far
    return scores


def seen(
    distance: Int[Array, "batch tokens keys"],
    last: Int[Array, "batch tokens"],
    keys: Int[Array, "batch keys"],
    rules: ScoreRules,
) -> Array:
    """Which keys each query sees [batch, tokens, keys]: those at positions up to its last."""
    within = keys[:, None, :] <= last[:, :, None]
    if rules.window is not None:
        within = within & (distance < rules.window)
    if rules.ahead is not None:
        within = within & (distance > -rules.ahead)
    return within

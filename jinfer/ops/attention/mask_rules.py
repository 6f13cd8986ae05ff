"""Attention mask and score modifiers: causal, sliding window, softcap, ALiBi, T5 bias, sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Float, Int


# Score bias [batch, heads, tokens, keys] as a function of query position minus key position.
type BiasFunction = Callable[
    [Int[Array, "batch tokens keys"]], Float[Array, "batch heads tokens keys"]
]


class ScoreRules(NamedTuple):
    """Mask of the keys that a query sees, and score modifiers (mask_mod and score_mod).

    A distance is the query's position minus the key's.

    Attributes:
        scale: multiplies the scores.
        softcap: scores then become softcap * tanh(scores / softcap).
        bias: a function whose result is then added; whole texts only.
        by_distance: column distance - lowest of this is added; distances beyond its ends use the
            nearest column (T5, arXiv 1910.10683).
        lowest: the distance of the first column of `by_distance`.
        slopes: distance times this, per head, is subtracted (ALiBi, arXiv 2108.12409).
        window: a query only sees keys less than this far before it, itself included.
        chunked: it sees keys since the last multiple of `window` instead (Llama 4).
        ahead: bidirectional attention only sees keys less than this far after the query.
        sinks: a score per head that takes part in the softmax and has no value.
    """

    scale: float
    softcap: float | None = None
    bias: BiasFunction | None = None
    window: int | None = None
    ahead: int | None = None
    sinks: Float[Array, " heads"] | None = None
    slopes: Float[Array, " heads"] | None = None
    by_distance: Float[Array, "heads distances"] | None = None
    lowest: int = 0
    chunked: bool = False


def modify_scores(
    scores: Float[Array, "batch heads tokens keys"],
    distance: Int[Array, "batch tokens keys"],
    rules: ScoreRules,
) -> Float[Array, "batch heads tokens keys"]:
    """Scaled scores with all modifiers applied, before masking."""
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


def attention_mask(
    distance: Int[Array, "batch tokens keys"],
    last: Int[Array, "batch tokens"],
    keys: Int[Array, "batch keys"],
    rules: ScoreRules,
) -> Array:
    """The attention mask [batch, tokens, keys]: keys at positions up to each query's last one."""
    within = keys[:, None, :] <= last[:, :, None]
    if rules.window is not None:
        within = within & (distance < rules.window)
    if rules.ahead is not None:
        within = within & (distance > -rules.ahead)
    return within

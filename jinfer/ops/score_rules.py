"""Mask and score rules of attention: which keys a query sees, and what is done to its scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jax import Array
from jaxtyping import Float, Int

# What is added to the scores, [batch, heads, tokens, keys], from query position minus key position.
Bias = Callable[[Int[Array, "batch tokens keys"]], Float[Array, "batch heads tokens keys"]]


class ScoreRules(NamedTuple):
    """What a query sees, and how its scores are changed.

    Attributes:
        scale: multiplies the scores.
        softcap: then scores become softcap * tanh(scores / softcap).
        bias: then this is added...
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

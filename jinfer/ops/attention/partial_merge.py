"""Flash decoding: exact merge of partial attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

if TYPE_CHECKING:
    from jaxtyping import Float


class PartialAttention(NamedTuple):
    """Attention over a subset of the keys, float32.

    Attributes:
        out: weighted sum of values, not normalized.
        sums: per query the maximum score, -inf if it saw no key, and the sum of exp(score -
            maximum).
    """

    out: Float[Array, "tokens heads value_dim"]
    sums: Float[Array, "tokens heads 2"]


def merge_partials(
    parts: Sequence[PartialAttention], sinks: Float[Array, " heads"] | None, dtype: DTypeLike
) -> Float[Array, "tokens heads value_dim"]:
    """Merges attention over disjoint keys; zero for queries that saw no key.

    Args:
        sinks: a score per head that takes part in the softmax and has no value.
    """
    outs = jnp.stack([part.out for part in parts])
    highest, totals = (jnp.stack([part.sums[..., i] for part in parts]) for i in (0, 1))
    maximum = jnp.max(highest, axis=0)
    if sinks is not None:
        maximum = jnp.maximum(maximum, sinks.astype(jnp.float32)[None])
    base = jnp.where(jnp.isfinite(maximum), maximum, 0.0)
    scales = jnp.exp(highest - base[None])
    total = jnp.sum(totals * scales, axis=0)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(jnp.float32)[None] - base)
    whole = jnp.sum(outs * scales[..., None], axis=0)
    return (whole / jnp.where(total == 0, 1.0, total)[..., None]).astype(dtype)

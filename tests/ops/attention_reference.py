"""Definitions of paged attention and of attention of whole texts, with all scores at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

from jinfer.ops.attention.dense_attention import dense_pattern, dense_scores
from jinfer.ops.attention.kv_cache import AttentionMetadata, KVPool
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.xla import dequantize_for

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def attend_reference(
    q: Float[Array, "tokens heads head_dim"],
    keys: KVPool,
    values: KVPool,
    at: AttentionMetadata,
    last: Int[Array, " tokens"],
    rules: ScoreRules,
) -> Float[Array, "tokens heads value_dim"]:
    """`attend`, over each token's whole sequence at once."""

    def whole(part: KVPool) -> Array:
        pool = dequantize_for(part, q)
        gathered = pool.at[at.tables[jnp.maximum(at.rows, 0)]].get(mode="clip").swapaxes(1, 2)
        return gathered.reshape(*gathered.shape[:2], -1, gathered.shape[4])

    last = jnp.where(at.rows >= 0, last, -1)[:, None]
    return _dense_attention(
        q[:, None], whole(keys), whole(values), at.positions[:, None], last, rules
    )[:, 0]


def attend_text_reference(
    q: Float[Array, "batch tokens heads head_dim"],
    k: Float[Array, "batch tokens kv_heads head_dim"],
    v: Float[Array, "batch tokens kv_heads value_dim"],
    lengths: Int[Array, " batch"],
    rules: ScoreRules,
) -> Float[Array, "batch tokens heads value_dim"]:
    """`attend_text`, over whole texts at once."""
    positions = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2])
    last = jnp.where(positions < lengths[:, None], lengths[:, None] - 1, -1)
    return _dense_attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), positions, last, rules)


def _dense_attention(
    q: Float[Array, "batch tokens heads head_dim"],
    k: Float[Array, "batch kv_heads keys head_dim"],
    v: Float[Array, "batch kv_heads keys value_dim"],
    positions: Int[Array, "batch tokens"],
    last: Int[Array, "batch tokens"],
    rules: ScoreRules,
) -> Float[Array, "batch tokens heads value_dim"]:
    """softmax(scores) @ values; key j has position j."""
    scores = dense_scores(q, k, positions, last, rules)
    visible = scores != -jnp.inf  # a NaN is seen
    weights, v = dense_pattern(scores, rules), jnp.repeat(v, q.shape[2] // k.shape[1], axis=1)
    # A masked value may be NaN.
    terms = weights[..., None] * v[:, :, None].astype(jnp.float32)
    out = jnp.sum(jnp.where(visible[..., None], terms, 0.0), axis=3)
    return out.swapaxes(1, 2).astype(q.dtype)

"""Taps of attention scores and patterns, which plain JAX computes in addition to a kernel.

`scores` are after scale and modifiers, before the softmax; `pattern` is after it. In a tap they are
[batch, tokens, heads, keys]. If one is edited, the attention's output is computed from the edited
pattern and not by the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jinfer.nn.activation_taps import is_edited, is_tapped, tapped
from jinfer.nn.forward_context import AttentionCache, ForwardBatch
from jinfer.ops.attention.dense_attention import dense_pattern, dense_scores, weighted_values
from jinfer.ops.attention.hadamard import rotate_queries
from jinfer.ops.attention.kv_cache import (
    ENCODER,
    AttentionMetadata,
    KVPool,
    LayerCache,
    cache_group,
)
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.xla import dequantize_for

if TYPE_CHECKING:
    from jaxtyping import Float, Int

PARTS = ("scores", "pattern")


def tap_text_pattern(
    out: Float[Array, "batch tokens heads value_dim"],
    q: Float[Array, "batch tokens heads head_dim"],
    k: Float[Array, "batch tokens kv_heads head_dim"],
    v: Float[Array, "batch tokens kv_heads value_dim"],
    lengths: Int[Array, " batch"],
    rules: ScoreRules,
) -> Float[Array, "batch tokens heads value_dim"]:
    """Computes attention of whole texts after taps of its scores and its pattern."""
    if not is_tapped(*PARTS):
        return out
    positions = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2])
    last = jnp.where(positions < lengths[:, None], lengths[:, None] - 1, -1)
    edited = _output(q, k.swapaxes(1, 2), v.swapaxes(1, 2), positions, last, rules, q.shape[:2])
    return out if edited is None else edited.astype(out.dtype)


def tap_cached_pattern(
    out: Float[Array, "tokens heads value_dim"],
    q: Float[Array, "tokens heads head_dim"],
    cache: AttentionCache,
    batch: ForwardBatch,
    rules: ScoreRules,
    encoded: bool = False,
) -> Float[Array, "tokens heads value_dim"]:
    """Computes attention over a KV cache after taps of its scores and its pattern.

    Args:
        q: as the kernel reads them, before they are rotated for a quantized cache.
        cache: with the new tokens; without values the keys are the values too.
        encoded: whether it is a cross-attention.
    """
    # Sparse attention, attention by other programs and tree attention have no pattern here.
    if not (is_tapped(*PARTS) and isinstance(cache, LayerCache) and batch.copies is None):
        return out
    at = batch.attention_metadata(ENCODER if encoded else cache_group(rules.window))
    last = batch.encoded_last() if encoded else at.positions
    last = jnp.where(at.rows >= 0, last, -1)
    positions = at.positions
    if rules.chunked:
        assert rules.window is not None, "the size of a chunk"
        positions = positions // rules.window * rules.window + rules.window - 1
    values = cache.keys if cache.values.shape[-1] == 0 else cache.values
    rotated = q if cache.values.shape[-1] == 0 else rotate_queries(q, cache.keys)
    keys, values = (_of_sequences(pool, at, rotated) for pool in (cache.keys, values))
    # One sequence: its keys are gathered once; with several, each token has its own.
    shape = (1, len(q)) if at.tables.shape[0] == 1 else (len(q), 1)
    operands = rotated.reshape(*shape, *q.shape[1:]), keys, values
    ranges = positions.reshape(shape), last.reshape(shape)
    edited = _output(*operands, *ranges, rules, (1, len(q)))
    return out if edited is None else edited.reshape(*q.shape[:2], -1).astype(out.dtype)


def _of_sequences(
    pool: KVPool, at: AttentionMetadata, like: Array
) -> Float[Array, "sequences kv_heads keys dim"]:
    """Concatenates cached vectors: of the only sequence, or of each token's sequence."""
    tables = at.tables if at.tables.shape[0] == 1 else at.tables[jnp.maximum(at.rows, 0)]
    blocks = jax.tree.map(lambda part: part.at[tables].get(mode="clip"), pool)
    gathered = dequantize_for(blocks, like).swapaxes(1, 2)
    return gathered.reshape(*gathered.shape[:2], -1, gathered.shape[4])


def _output(
    q: Array,
    k: Float[Array, "batch kv_heads keys head_dim"],
    v: Float[Array, "batch kv_heads keys value_dim"],
    positions: Array,
    last: Array,
    rules: ScoreRules,
    lead: tuple[int, ...],
) -> Float[Array, "batch tokens heads value_dim"] | None:
    """Taps scores and pattern; returns the output that follows if one of them is edited."""
    scores = dense_scores(q, k, positions, last, rules)
    visible = jnp.isfinite(scores)
    scores = jnp.where(visible, _tapped("scores", scores, lead), -jnp.inf)
    pattern = dense_pattern(scores, rules)
    pattern = jnp.where(visible, _tapped("pattern", pattern, lead), 0.0)
    return weighted_values(pattern, v) if is_edited(*PARTS) else None


def _tapped(
    name: str, value: Float[Array, "batch heads tokens keys"], lead: tuple[int, ...]
) -> Float[Array, "batch heads tokens keys"]:
    """Taps a value with the token axes first."""
    rows = value.swapaxes(1, 2)
    return tapped(name, rows.reshape(*lead, *rows.shape[2:])).reshape(rows.shape).swapaxes(1, 2)

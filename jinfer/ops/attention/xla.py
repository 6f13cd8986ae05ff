"""Paged attention and attention of whole texts in XLA operations, with an online softmax.

A loop runs over blocks of keys and keeps a running maximum and sum (online softmax, arXiv
2112.05682), so the cost follows the number of tokens and not the width of the block tables; of a
quantized cache only the current blocks are dequantized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.matmul_precision import matmul_precision
from jinfer.ops.attention.dense_attention import highest_score
from jinfer.ops.attention.kv_cache import AttentionMetadata, KVPool, LayerCache, write_cache
from jinfer.ops.attention.mask_rules import ScoreRules, attention_mask, modify_scores
from jinfer.ops.attention.partial_merge import PartialAttention
from jinfer.ops.backend import needs_derivatives
from jinfer.quant.kv_vectors import QuantizedVectors

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

KEYS_PER_STEP = 256  # keys of a loop iteration
FEW_TOKENS = 64  # up to this many tokens, each reads its own sequence's blocks


class PartialSoftmax(NamedTuple):
    """Attention over a subset of the keys; `merge_softmax` merges such parts exactly.

    Attributes:
        out: weighted sum of values, not yet divided by `total`.
        highest: largest score of each row, -inf if it saw no key.
        total: sum of exp(score - highest).
    """

    out: Float[Array, "batch kv_heads rows head_dim"]
    highest: Float[Array, "batch kv_heads rows"]
    total: Float[Array, "batch kv_heads rows"]


def merge_softmax(a: PartialSoftmax, b: PartialSoftmax) -> PartialSoftmax:
    """Merges attention over two disjoint subsets of keys."""
    highest = jnp.maximum(a.highest, b.highest)
    finite = jnp.where(jnp.isfinite(highest), highest, 0.0)
    scale_a, scale_b = jnp.exp(a.highest - finite), jnp.exp(b.highest - finite)
    out = a.out * scale_a[..., None] + b.out * scale_b[..., None]
    return PartialSoftmax(out, highest, a.total * scale_a + b.total * scale_b)


def extend_xla(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads value_dim"] | None,
    cache: LayerCache,
    at: AttentionMetadata,
    rules: ScoreRules,
) -> tuple[Float[Array, "tokens heads value_dim"], LayerCache]:
    """`jinfer.ops.attention.paged_attention.extend` in XLA operations."""
    cache = write_cache(cache, k, k[..., :0] if v is None else v, at)
    values = cache.keys if v is None else cache.values
    return attend_xla(q, cache.keys, values, at, at.positions, rules), cache


def attend_xla(
    q: Float[Array, "tokens heads head_dim"],
    keys: KVPool,
    values: KVPool,
    at: AttentionMetadata,
    last: Int[Array, " tokens"],
    rules: ScoreRules,
) -> Float[Array, "tokens heads value_dim"]:
    """`jinfer.ops.attention.paged_attention.attend` in XLA operations."""
    done, shaped = _attend_blocks(q, keys, values, at, last, rules)
    return _normalized(done, shaped).reshape(*q.shape[:2], -1)


def attend_partial_xla(
    q: Float[Array, "tokens heads head_dim"],
    keys: KVPool,
    values: KVPool,
    at: AttentionMetadata,
    last: Int[Array, " tokens"],
    rules: ScoreRules,
) -> PartialAttention:
    """Attention over the blocks in this pool; table entries may be -1. Without sinks."""
    done, shaped = _attend_blocks(q, keys, values, at, last, rules)
    sums = jnp.stack([done.highest, done.total], axis=-1)
    out, sums = (
        _ungroup_heads(part, shaped).reshape(*q.shape[:2], -1) for part in (done.out, sums)
    )
    return PartialAttention(out, sums)


def _attend_blocks(
    q: Array, keys: KVPool, values: KVPool, at: AttentionMetadata, last: Array, rules: ScoreRules
) -> tuple[PartialSoftmax, Array]:
    """Computes attention over all blocks; also returns the reshaped queries."""
    # Padding sees nothing, and positions end where the table ends.
    last = jnp.minimum(last, at.tables.shape[1] * keys.shape[2] - 1)
    at = at._replace(rows=jnp.where(at.rows < at.tables.shape[0], at.rows, -1))
    last = jnp.where(at.rows >= 0, last, -1)
    if needs_derivatives():
        return _all_keys_at_once(q, keys, values, at, last, rules)
    form = _token_by_token if q.shape[0] <= FEW_TOKENS else _sequence_by_sequence
    return form(q, keys, values, at, last, rules)


def attend_text_xla(
    q: Float[Array, "batch tokens heads head_dim"],
    k: Float[Array, "batch kv_heads tokens head_dim"],
    v: Float[Array, "batch kv_heads tokens value_dim"],
    lengths: Int[Array, " batch"],
    rules: ScoreRules,
) -> Float[Array, "batch tokens heads value_dim"]:
    """`paged_attention.attend_text` in XLA operations; keys as [batch, kv_heads, tokens, dim]."""
    tokens = q.shape[1]
    step = min(KEYS_PER_STEP, tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), q.shape[:2])
    last = jnp.where(positions < lengths[:, None], lengths[:, None] - 1, -1)
    before = _initial_softmax(q, k.shape[1], v.shape[3], rules)
    if needs_derivatives():
        here, every = jnp.arange(tokens, dtype=jnp.int32)[None], jnp.ones((1, 1, 1), bool)
        part = _partial(q, k, v, positions, last, here, every, rules)
        return _normalized(merge_softmax(before, part), q)

    def walk(index: Array, so_far: PartialSoftmax) -> PartialSoftmax:
        # The last step begins earlier if the length does not divide; `fresh` masks the keys of the
        # step before.
        start = jnp.minimum(index * step, tokens - step)
        cut_k, cut_v = (lax.dynamic_slice_in_dim(x, start, step, axis=2) for x in (k, v))
        here = (start + lax.iota(jnp.int32, step))[None]
        fresh = (here >= index * step)[:, None]
        return merge_softmax(so_far, _partial(q, cut_k, cut_v, positions, last, here, fresh, rules))

    count = jnp.max(last) // step + 1
    return _normalized(lax.fori_loop(0, count, walk, before), q)


def _all_keys_at_once(
    q: Array, keys: KVPool, values: KVPool, at: AttentionMetadata, last: Array, rules: ScoreRules
) -> tuple[PartialSoftmax, Array]:
    """Computes attention without a loop of data-dependent length, so that it is differentiable.

    Tokens of a single sequence share its keys; with several sequences each token has a copy.
    """
    single = at.tables.shape[0] == 1
    tables = at.tables if single else at.tables[jnp.maximum(at.rows, 0)]
    positions, last, shaped = (
        part[None] if single else part[:, None] for part in (at.positions, last, q)
    )

    def whole(part: KVPool) -> Float[Array, "batch kv_heads keys dim"]:
        gathered = dequantize_for(_gather_blocks(part, tables), q).swapaxes(1, 2)
        return gathered.reshape(*gathered.shape[:2], -1, gathered.shape[4])

    k, v = whole(keys), whole(values)
    here = jnp.arange(k.shape[2], dtype=jnp.int32)[None]
    shown = jnp.repeat(tables >= 0, keys.shape[2], axis=1)[:, None]
    before = _initial_softmax(shaped, keys.shape[1], values.shape[3], rules)
    part = _partial(shaped, k, v, positions, last, here, shown, rules)
    return merge_softmax(before, part), shaped


def _token_by_token(
    q: Array, keys: KVPool, values: KVPool, at: AttentionMetadata, last: Array, rules: ScoreRules
) -> tuple[PartialSoftmax, Array]:
    """Computes attention of few tokens in parallel: each reads the blocks of its own sequence."""
    size, alone = keys.shape[2], q[:, None]
    positions, last = at.positions[:, None], last[:, None]
    tables = at.tables[jnp.maximum(at.rows, 0)]

    def walk(index: Array, so_far: PartialSoftmax) -> PartialSoftmax:
        ids = lax.dynamic_index_in_dim(tables, index, axis=1, keepdims=False)
        k, v = (dequantize_for(_gather_blocks(part, ids), q) for part in (keys, values))
        here = (index * size + lax.iota(jnp.int32, size))[None]
        shown = (ids >= 0)[:, None, None]
        return merge_softmax(so_far, _partial(alone, k, v, positions, last, here, shown, rules))

    first, count = _bounds(positions, last, last >= 0, size, rules)
    before = _initial_softmax(alone, keys.shape[1], values.shape[3], rules)
    return lax.fori_loop(first, count, walk, before), alone


def _sequence_by_sequence(
    q: Array, keys: KVPool, values: KVPool, at: AttentionMetadata, last: Array, rules: ScoreRules
) -> tuple[PartialSoftmax, Array]:
    """Computes attention of many tokens: a loop over sequences; all tokens read their blocks."""
    size, whole = keys.shape[2], q[None]
    wide = max(1, KEYS_PER_STEP // size)
    positions, last = at.positions[None], last[None]

    def sequence(row: Array, so_far: PartialSoftmax) -> PartialSoftmax:
        mine = (at.rows == row)[None]
        table = lax.dynamic_index_in_dim(at.tables, row, keepdims=False)

        def walk(index: Array, so_far: PartialSoftmax) -> PartialSoftmax:
            ids = table.at[index * wide + lax.iota(jnp.int32, wide)].get(mode="clip")
            k, v = (
                _side_by_side(dequantize_for(_gather_blocks(x, ids), q)) for x in (keys, values)
            )
            here = (index * wide * size + lax.iota(jnp.int32, wide * size))[None]
            shown = mine[:, :, None] & jnp.repeat(ids >= 0, size)[None, None]
            part = _partial(whole, k, v, positions, last, here, shown, rules)
            return merge_softmax(so_far, part)

        return lax.fori_loop(*_bounds(positions, last, mine, wide * size, rules), walk, so_far)

    before = _initial_softmax(whole, keys.shape[1], values.shape[3], rules)
    return lax.fori_loop(0, at.tables.shape[0], sequence, before), whole


def _bounds(
    positions: Array, last: Array, mine: Array, step: int, rules: ScoreRules
) -> tuple[Array, Array]:
    """Returns the range of steps that contain any key these tokens see."""
    int_max = jnp.iinfo(jnp.int32).max
    count = jnp.max(jnp.where(mine, last, -1)) // step + 1
    if rules.window is None:
        return jnp.int32(0), count
    first = jnp.min(jnp.where(mine, positions, int_max)) - (rules.window - 1)
    return jnp.maximum(first, 0) // step, count


def _gather_blocks(part: KVPool, ids: Array) -> KVPool:
    """Gathers blocks of a pool; an invalid id, which is masked, gives any block."""
    return jax.tree.map(lambda array: array.at[ids].get(mode="clip"), part)


def _side_by_side(blocks: Float[Array, "blocks kv_heads size dim"]) -> Array:
    """[1, kv_heads, blocks * size, dim]."""
    return blocks.swapaxes(0, 1).reshape(1, blocks.shape[1], -1, blocks.shape[3])


def dequantize_for(part: KVPool, q: Array) -> Array:
    """Dequantizes keys or values to a type that can be multiplied with q."""
    if isinstance(part, QuantizedVectors):
        return part.dequantize(q.dtype)
    return part if part.dtype == q.dtype else part.astype(jnp.float32)


def _partial(
    q: Float[Array, "batch tokens heads head_dim"],
    k: Float[Array, "batch kv_heads keys head_dim"],
    v: Float[Array, "batch kv_heads keys value_dim"],
    positions: Int[Array, "batch tokens"],
    last: Int[Array, "batch tokens"],
    here: Int[Array, "batch keys"],
    shown: Bool[Array, "#batch #tokens #keys"] | Bool[Array, ""],
    rules: ScoreRules,
) -> PartialSoftmax:
    """Computes attention over the keys at positions `here`, masked by `shown`."""
    batch, tokens, heads, _ = q.shape
    kv_heads = k.shape[1]
    batched = ((0, 1), (0, 1))
    distance = positions[:, :, None] - here[:, None, :]
    scores = rules.scale * lax.dot_general(
        _group_heads(q, kv_heads).astype(k.dtype),
        k,
        (((3,), (3,)), batched),
        precision=matmul_precision(k),
        preferred_element_type=jnp.float32,
    )
    scores = modify_scores(scores.reshape(batch, heads, tokens, -1), distance, rules)
    visible = attention_mask(distance, last, here, rules) & shown
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    scores = scores.reshape(batch, kv_heads, -1, scores.shape[3])
    highest = highest_score(scores)
    finite = jnp.where(jnp.isfinite(highest), highest, 0.0)
    weights = jnp.exp(scores - finite[..., None])
    # A masked value may be NaN, and 0 * NaN is NaN: non-finite values stay out of the product, and
    # queries that do see them become NaN.
    number = jnp.isfinite(v)
    out = lax.dot_general(
        weights.astype(v.dtype),
        jnp.where(number, v, jnp.zeros((), v.dtype)),
        (((3,), (2,)), batched),
        precision=matmul_precision(v),
        preferred_element_type=jnp.float32,
    )
    broken = ~jnp.all(number, axis=-1)
    hurt = jnp.any(visible[:, None] & broken[:, :, None], axis=-1)[:, :, None, :, None]
    grouped = out.reshape(batch, kv_heads, -1, tokens, v.shape[3])
    out = jnp.where(hurt, jnp.nan, grouped).reshape(out.shape)
    return PartialSoftmax(out, highest, jnp.sum(weights, axis=-1))


def _initial_softmax(q: Array, kv_heads: int, value_dim: int, rules: ScoreRules) -> PartialSoftmax:
    """The initial state of the online softmax: no keys, or the sinks."""
    batch, tokens, heads, _ = q.shape
    rows = heads // kv_heads * tokens
    out = jnp.zeros((batch, kv_heads, rows, value_dim), jnp.float32)
    if rules.sinks is None:
        empty = jnp.full((batch, kv_heads, rows), -jnp.inf, jnp.float32)
        return PartialSoftmax(out, empty, jnp.zeros_like(empty))
    per_row = jnp.broadcast_to(rules.sinks[None, None, :, None], (batch, tokens, heads, 1))
    highest = _group_heads(per_row.astype(jnp.float32), kv_heads)[..., 0]
    return PartialSoftmax(out, highest, jnp.ones_like(highest))


def _normalized(done: PartialSoftmax, q: Array) -> Array:
    """The normalized output; zero for queries that saw no key."""
    out = done.out / jnp.where(done.total == 0, 1.0, done.total)[..., None]
    return _ungroup_heads(out, q).astype(q.dtype)


def _ungroup_heads(rows: Float[Array, "batch kv_heads rows dim"], q: Array) -> Array:
    """[batch, tokens, heads, dim]: the inverse of `_group_heads`."""
    batch, tokens, heads, _ = q.shape
    kv_heads, dim = rows.shape[1], rows.shape[3]
    grouped = rows.reshape(batch, kv_heads, heads // kv_heads, tokens, dim)
    return grouped.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, heads, dim)


def _group_heads(q: Array, kv_heads: int) -> Array:
    """[batch, tokens, heads, d] -> [batch, kv_heads, heads / kv_heads * tokens, d]."""
    batch, tokens, heads, head_dim = q.shape
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, head_dim)

"""Attention of new tokens over a cache of keys and values.

`attend` walks over the cache in blocks and keeps a running maximum and sum of the softmax (arXiv
2112.05682), so its cost follows the tokens that are there and not the cache's length.
`attend_reference` is the definition, which it is tested against.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

BLOCK = 256  # keys a step of the loop looks at

# What is added to the scores, [batch, heads, tokens, keys], from query position minus key position.
Bias = Callable[[Int[Array, "batch tokens keys"]], Float[Array, "batch heads tokens keys"]]


class Partial(NamedTuple):
    """Attention over a part of the keys; parts are merged exactly by `merge`.

    Attributes:
        out: weighted sum of values, not yet divided by `total`.
        highest: largest score of each row, -inf where it saw no key.
        total: sum of exp(score - highest).
    """

    out: Float[Array, "batch kv_heads rows head_dim"]
    highest: Float[Array, "batch kv_heads rows"]
    total: Float[Array, "batch kv_heads rows"]


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both parts."""
    highest = jnp.maximum(a.highest, b.highest)
    finite = jnp.where(jnp.isfinite(highest), highest, 0.0)
    scale_a, scale_b = jnp.exp(a.highest - finite), jnp.exp(b.highest - finite)
    out = a.out * scale_a[..., None] + b.out * scale_b[..., None]
    return Partial(out, highest, a.total * scale_a + b.total * scale_b)


class Sight(NamedTuple):
    """What a query sees, and how its scores are changed.

    Attributes:
        scale: multiplies the scores.
        softcap: then scores become softcap * tanh(scores / softcap).
        bias: then this is added.
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


def attend(
    q: Float[Array, "batch tokens heads head_dim"],
    keys: Float[Array, "slots kv_heads length head_dim"],
    values: Float[Array, "slots kv_heads length value_dim"],
    positions: Int[Array, "batch tokens"],
    last: Int[Array, "batch tokens"],
    slot: Int[Array, ""],
    sight: Sight,
) -> Float[Array, "batch tokens heads value_dim"]:
    """Attention; key j of a row has position j. A query that sees no key gets zeros.

    Args:
        q: queries; query head h reads key head h * kv_heads // heads.
        keys, values: the cache, with the new tokens already in it.
        positions: of the queries.
        last: the last key a query may see: its own position where attention is causal.
        slot: row b of the batch is row slot + b of the cache.
    """
    length = keys.shape[2]
    block = min(BLOCK, length)
    rows = _rows(q, keys.shape[1])
    first = jnp.int32(0)
    if sight.window is not None:
        first = jnp.maximum(jnp.min(positions) - (sight.window - 1), 0) // block
    count = jnp.minimum(jnp.max(last) // block + 1, -(-length // block))

    def step(index: Array, so_far: Partial) -> Partial:
        # The last block of a length that does not divide begins earlier; `fresh` masks the
        # keys that the block before has had.
        start = jnp.minimum(index * block, length - block)
        k, v = (_slice(part, slot, start, q.shape[0], block) for part in (keys, values))
        key_positions = start + lax.iota(jnp.int32, block)
        fresh = key_positions >= index * block
        part = _partial(rows, k, v, positions, last, key_positions, fresh, sight)
        return merge(so_far, part)

    done = lax.fori_loop(first, count, step, _before(rows, values.shape[3], sight, q))
    return _unrows(done.out / jnp.where(done.total > 0, done.total, 1.0)[..., None], q)


def attend_reference(
    q: Float[Array, "batch tokens heads head_dim"],
    keys: Float[Array, "slots kv_heads length head_dim"],
    values: Float[Array, "slots kv_heads length value_dim"],
    positions: Int[Array, "batch tokens"],
    last: Int[Array, "batch tokens"],
    slot: Int[Array, ""],
    sight: Sight,
) -> Float[Array, "batch tokens heads value_dim"]:
    """What `attend` computes, over the whole cache at once."""
    batch, heads = q.shape[0], q.shape[2]
    group = heads // keys.shape[1]
    k = jnp.repeat(lax.dynamic_slice_in_dim(keys, slot, batch), group, axis=1)
    v = jnp.repeat(lax.dynamic_slice_in_dim(values, slot, batch), group, axis=1)
    scores = sight.scale * jnp.einsum("bthd,bhld->bhtl", q, k, preferred_element_type=jnp.float32)
    key_positions = jnp.arange(keys.shape[2], dtype=jnp.int32)
    distance = positions[:, :, None] - key_positions[None, None]
    if sight.softcap is not None:
        scores = sight.softcap * jnp.tanh(scores / sight.softcap)
    if sight.bias is not None:
        scores = scores + sight.bias(distance)
    seen = _seen(distance, last, key_positions, sight)
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    if sight.sinks is not None:
        sinks = jnp.broadcast_to(sight.sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sinks.astype(jnp.float32)], axis=-1)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    weights = weights[..., : keys.shape[2]]
    out = jnp.einsum("bhtl,bhld->bthd", weights, v.astype(jnp.float32))
    return out.astype(q.dtype)


def _before(rows: Array, value_dim: int, sight: Sight, q: Array) -> Partial:
    """Attention over no keys yet: nothing, or the sinks."""
    batch, kv_heads, n, _ = rows.shape
    out = jnp.zeros((batch, kv_heads, n, value_dim), jnp.float32)
    if sight.sinks is None:
        empty = jnp.full((batch, kv_heads, n), -jnp.inf, jnp.float32)
        return Partial(out, empty, jnp.zeros_like(empty))
    per_row = jnp.broadcast_to(sight.sinks[None, None, :, None], (*q.shape[:3], 1))
    highest = _rows(per_row.astype(jnp.float32), kv_heads)[..., 0]
    return Partial(out, highest, jnp.ones_like(highest))


def _slice(part: Array, slot: Array, start: Array, batch: int, block: int) -> Array:
    at = (slot, jnp.int32(0), start, jnp.int32(0))
    return lax.dynamic_slice(part, at, (batch, part.shape[1], block, part.shape[3]))


def _seen(distance: Array, last: Array, key_positions: Array, sight: Sight) -> Array:
    """Which keys each query sees [batch, tokens, keys]."""
    seen = key_positions[None, None, :] <= last[:, :, None]
    if sight.window is not None:
        seen = seen & (distance < sight.window)
    if sight.ahead is not None:
        seen = seen & (distance > -sight.ahead)
    return seen


def _rows(q: Array, kv_heads: int) -> Array:
    """[batch, tokens, heads, d] -> [batch, kv_heads, heads / kv_heads * tokens, d]."""
    batch, tokens, heads, head_dim = q.shape
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, head_dim)


def _unrows(rows: Array, q: Array) -> Array:
    batch, tokens, heads, _ = q.shape
    kv_heads, value_dim = rows.shape[1], rows.shape[3]
    grouped = rows.reshape(batch, kv_heads, heads // kv_heads, tokens, value_dim)
    out = grouped.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, heads, value_dim)
    return out.astype(q.dtype)


def _partial(
    rows: Array,
    k: Array,
    v: Array,
    positions: Array,
    last: Array,
    key_positions: Array,
    fresh: Array,
    sight: Sight,
) -> Partial:
    """Attention over one block of keys."""
    batch, kv_heads, n, _ = rows.shape
    tokens = positions.shape[1]
    batched = ((0, 1), (0, 1))
    scores = sight.scale * lax.dot_general(
        rows, k, (((3,), (3,)), batched), preferred_element_type=jnp.float32
    )
    scores = scores.reshape(batch, kv_heads, n // tokens, tokens, -1)
    distance = positions[:, :, None] - key_positions[None, None, :]
    if sight.softcap is not None:
        scores = sight.softcap * jnp.tanh(scores / sight.softcap)
    if sight.bias is not None:
        bias = sight.bias(distance)
        scores = scores + bias.reshape(bias.shape[0], *scores.shape[1:])
    seen = _seen(distance, last, key_positions, sight) & fresh[None, None, :]
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf).reshape(batch, kv_heads, n, -1)
    highest = jnp.max(scores, axis=-1)
    finite = jnp.where(jnp.isfinite(highest), highest, 0.0)
    weights = jnp.exp(scores - finite[..., None])
    out = lax.dot_general(
        weights.astype(v.dtype), v, (((3,), (2,)), batched), preferred_element_type=jnp.float32
    )
    return Partial(out, highest, jnp.sum(weights, axis=-1))

"""Attention of new tokens over a cache of keys and values.

`attend` walks over the cache in blocks and keeps a running maximum and sum of the softmax (arXiv
2112.05682), so its cost follows the tokens that are there and not the cache's length.
`attend_reference` is the definition, which it is tested against.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

BLOCK = 256  # keys a step of the loop looks at


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


def attend(
    q: Float[Array, "batch tokens heads head_dim"],
    keys: Float[Array, "slots kv_heads length head_dim"],
    values: Float[Array, "slots kv_heads length head_dim"],
    positions: Int[Array, "batch tokens"],
    slot: Int[Array, ""],
    *,
    scale: float,
    window: int | None = None,
    slopes: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch tokens heads head_dim"]:
    """Causal attention; key j of a row has position j.

    Args:
        q: queries; query head h reads key head h * kv_heads // heads.
        keys, values: the cache, with the new tokens already in it.
        positions: of the queries; a query sees keys up to its own position.
        slot: row b of the batch is row slot + b of the cache.
        scale: multiplies the scores.
        window: a query sees only the last `window` keys, its own included.
        slopes: ALiBi; -slope * distance is added to the scaled scores.
    """
    length = keys.shape[2]
    block = min(BLOCK, length)
    rows = _rows(q, keys.shape[1])
    first = jnp.int32(0)
    if window is not None:
        first = jnp.maximum(jnp.min(positions) - (window - 1), 0) // block
    count = jnp.max(positions) // block + 1

    def step(index: Array, so_far: Partial) -> Partial:
        # The last block of a length that does not divide begins earlier; `fresh` masks the
        # keys that the block before has had.
        start = jnp.minimum(index * block, length - block)
        at = (slot, jnp.int32(0), start, jnp.int32(0))
        size = (q.shape[0], keys.shape[1], block, keys.shape[3])
        k, v = lax.dynamic_slice(keys, at, size), lax.dynamic_slice(values, at, size)
        key_positions = start + lax.iota(jnp.int32, block)
        fresh = key_positions >= index * block
        return merge(
            so_far, _partial(rows, k, v, positions, key_positions, fresh, scale, window, slopes)
        )

    batch, kv_heads, n, head_dim = rows.shape
    nothing = Partial(
        jnp.zeros((batch, kv_heads, n, head_dim), jnp.float32),
        jnp.full((batch, kv_heads, n), -jnp.inf, jnp.float32),
        jnp.zeros((batch, kv_heads, n), jnp.float32),
    )
    done = lax.fori_loop(first, jnp.minimum(count, -(-length // block)), step, nothing)
    return _unrows(done.out / done.total[..., None], q)


def attend_reference(
    q: Float[Array, "batch tokens heads head_dim"],
    keys: Float[Array, "slots kv_heads length head_dim"],
    values: Float[Array, "slots kv_heads length head_dim"],
    positions: Int[Array, "batch tokens"],
    slot: Int[Array, ""],
    *,
    scale: float,
    window: int | None = None,
    slopes: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch tokens heads head_dim"]:
    """What `attend` computes, over the whole cache at once."""
    batch, heads = q.shape[0], q.shape[2]
    group = heads // keys.shape[1]
    k = jnp.repeat(lax.dynamic_slice_in_dim(keys, slot, batch), group, axis=1)
    v = jnp.repeat(lax.dynamic_slice_in_dim(values, slot, batch), group, axis=1)
    scores = scale * jnp.einsum("bthd,bhld->bhtl", q, k, preferred_element_type=jnp.float32)
    distance = positions[:, None, :, None] - jnp.arange(keys.shape[2])[None, None, None, :]
    if slopes is not None:
        scores = scores - slopes[None, :, None, None] * distance.astype(jnp.float32)
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    scores = jnp.where(seen, scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("bhtl,bhld->bthd", weights, v.astype(jnp.float32))
    return out.astype(q.dtype)


def _rows(q: Array, kv_heads: int) -> Array:
    """[batch, tokens, heads, d] -> [batch, kv_heads, heads / kv_heads * tokens, d]."""
    batch, tokens, heads, head_dim = q.shape
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, head_dim)


def _unrows(rows: Array, q: Array) -> Array:
    batch, tokens, heads, head_dim = q.shape
    kv_heads = rows.shape[1]
    grouped = rows.reshape(batch, kv_heads, heads // kv_heads, tokens, head_dim)
    return grouped.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def _partial(
    rows: Array,
    k: Array,
    v: Array,
    positions: Array,
    key_positions: Array,
    fresh: Array,
    scale: float,
    window: int | None,
    slopes: Array | None,
) -> Partial:
    batch, kv_heads, n, _ = rows.shape
    tokens = positions.shape[1]
    batched = ((0, 1), (0, 1))
    scores = scale * lax.dot_general(
        rows, k, (((3,), (3,)), batched), preferred_element_type=jnp.float32
    )
    scores = scores.reshape(batch, kv_heads, n // tokens, tokens, -1)
    distance = positions[:, :, None] - key_positions[None, None, :]
    if slopes is not None:
        per_head = slopes.reshape(1, kv_heads, n // tokens, 1, 1)
        scores = scores - per_head * distance[:, None, None].astype(jnp.float32)
    seen = (distance >= 0) & fresh[None, None, :]
    if window is not None:
        seen = seen & (distance < window)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf).reshape(batch, kv_heads, n, -1)
    highest = jnp.max(scores, axis=-1)
    finite = jnp.where(jnp.isfinite(highest), highest, 0.0)
    weights = jnp.exp(scores - finite[..., None])
    out = lax.dot_general(
        weights.astype(v.dtype), v, (((3,), (2,)), batched), preferred_element_type=jnp.float32
    )
    return Partial(out, highest, jnp.sum(weights, axis=-1))

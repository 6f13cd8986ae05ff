"""Attention of new tokens over a cache of keys and values.

`attend` walks over the cache in blocks and keeps a running maximum and sum of the softmax (arXiv
2112.05682), so its cost follows the tokens that are there and not the cache's length; of a
quantized cache one block at a time is decoded. `extend` first puts the new tokens' keys and values
into the cache. Where there is one, a custom call for CPUs or a kernel for GPUs computes them, else
XLA's operations. `attend_reference` is the definition, which they are tested against.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from jinfer.cpu import attention as custom
from jinfer.ops.attention_gpu import attend_gpu, serves
from jinfer.ops.cache import LayerCache, Rows, write
from jinfer.ops.score_rules import ScoreRules
from jinfer.quant.kind import PLAIN
from jinfer.quant.vectors import QuantizedVectors

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


def extend(
    q: Float[Array, "batch tokens heads head_dim"],
    k: Float[Array, "batch tokens kv_heads head_dim"],
    v: Float[Array, "batch tokens kv_heads value_dim"] | None,
    cache: LayerCache,
    positions: Int[Array, "batch tokens"],
    slot: Int[Array, ""],
    rules: ScoreRules,
) -> tuple[Float[Array, "batch tokens heads value_dim"], LayerCache]:
    """Puts new tokens into the cache, then lets each see those up to itself.

    Args:
        k, v: keys and values of the new tokens; without v the keys are the values too, and the
            cache keeps no values.
        cache: must not be used afterwards.
        positions: of the new tokens; those of a row follow one another.
        slot: row b of the batch is row slot + b of the cache.

    Returns:
        Attention's output, and the cache with the new tokens in it.
    """
    route = _route(q, cache.keys, None if v is None else cache.values, rules)
    if route == "xla":
        return extend_xla(q, k, v, cache, positions, slot, rules)
    if route == "gpu":
        cache = write(cache, k, k[..., :0] if v is None else v, positions[:, 0], slot)
        written = None if v is None else cache.values
        return attend_gpu(q, cache.keys, written, positions, positions, slot, rules), cache
    values = None if v is None else _parts(cache.values)
    new = (k.astype(q.dtype), *(() if v is None else (v.astype(q.dtype),)))
    keys, coding, scores = _parts(cache.keys), _coding(cache.keys), _scores(rules)
    out, *kept = custom.attention(q, positions, positions, slot, keys, values, coding, scores, new)
    after = LayerCache(_with_parts(cache.keys, kept[0]), cache.values)
    return out, after if v is None else after._replace(values=_with_parts(cache.values, kept[1]))


def attend(
    q: Float[Array, "batch tokens heads head_dim"],
    keys: Rows,
    values: Rows,
    positions: Int[Array, "batch tokens"],
    last: Int[Array, "batch tokens"],
    slot: Int[Array, ""],
    rules: ScoreRules,
) -> Float[Array, "batch tokens heads value_dim"]:
    """Attention; key j of a row has position j. A query that sees no key gets zeros.

    Args:
        q: queries; query head h reads key head h * kv_heads // heads.
        keys, values: [slots, kv_heads, length, head_dim], the cache, with the new tokens already
            in it.
        positions: of the queries.
        last: the last key a query may see: its own position where attention is causal.
        slot: row b of the batch is row slot + b of the cache.
    """
    route = _route(q, keys, values, rules)
    if route != "cpu":
        form = attend_gpu if route == "gpu" else attend_xla
        return form(q, keys, values, positions, last, slot, rules)
    parts = _parts(keys), _parts(values)
    return custom.attention(q, positions, last, slot, *parts, _coding(keys), _scores(rules))[0]


def extend_xla(
    q: Float[Array, "batch tokens heads head_dim"],
    k: Float[Array, "batch tokens kv_heads head_dim"],
    v: Float[Array, "batch tokens kv_heads value_dim"] | None,
    cache: LayerCache,
    positions: Int[Array, "batch tokens"],
    slot: Int[Array, ""],
    rules: ScoreRules,
) -> tuple[Float[Array, "batch tokens heads value_dim"], LayerCache]:
    """`extend` by XLA's operations."""
    cache = write(cache, k, k[..., :0] if v is None else v, positions[:, 0], slot)
    values = cache.keys if v is None else cache.values
    return attend_xla(q, cache.keys, values, positions, positions, slot, rules), cache


def attend_xla(
    q: Float[Array, "batch tokens heads head_dim"],
    keys: Rows,
    values: Rows,
    positions: Int[Array, "batch tokens"],
    last: Int[Array, "batch tokens"],
    slot: Int[Array, ""],
    rules: ScoreRules,
) -> Float[Array, "batch tokens heads value_dim"]:
    """`attend` by XLA's operations."""
    length = keys.shape[2]
    block = min(BLOCK, length)
    rows = _rows(q, keys.shape[1])
    first = jnp.int32(0)
    if rules.window is not None:
        first = jnp.maximum(jnp.min(positions) - (rules.window - 1), 0) // block
    count = jnp.minimum(jnp.max(last) // block + 1, -(-length // block))

    def step(index: Array, so_far: Partial) -> Partial:
        # The last block of a length that does not divide begins earlier; `fresh` masks the
        # keys that the block before has had.
        start = jnp.minimum(index * block, length - block)
        k, v = (_block(part, slot, start, q, block) for part in (keys, values))
        key_positions = start + lax.iota(jnp.int32, block)
        fresh = key_positions >= index * block
        part = _partial(rows.astype(k.dtype), k, v, positions, last, key_positions, fresh, rules)
        return merge(so_far, part)

    done = lax.fori_loop(first, count, step, _before(rows, values.shape[3], rules, q))
    return _unrows(done.out / jnp.where(done.total > 0, done.total, 1.0)[..., None], q)


def attend_reference(
    q: Float[Array, "batch tokens heads head_dim"],
    keys: Rows,
    values: Rows,
    positions: Int[Array, "batch tokens"],
    last: Int[Array, "batch tokens"],
    slot: Int[Array, ""],
    rules: ScoreRules,
) -> Float[Array, "batch tokens heads value_dim"]:
    """What `attend` computes, over the whole cache at once."""
    batch, heads = q.shape[0], q.shape[2]
    group = heads // keys.shape[1]
    keys, values = (_as_computed(part, q) for part in (keys, values))
    k = jnp.repeat(lax.dynamic_slice_in_dim(keys, slot, batch), group, axis=1)
    v = jnp.repeat(lax.dynamic_slice_in_dim(values, slot, batch), group, axis=1)
    scores = rules.scale * jnp.einsum(
        "bthd,bhld->bhtl", q.astype(k.dtype), k, preferred_element_type=jnp.float32
    )
    key_positions = jnp.arange(keys.shape[2], dtype=jnp.int32)
    distance = positions[:, :, None] - key_positions[None, None]
    if rules.softcap is not None:
        scores = rules.softcap * jnp.tanh(scores / rules.softcap)
    if rules.bias is not None:
        scores = scores + rules.bias(distance)
    if rules.slopes is not None:
        far = distance[:, None].astype(jnp.float32)
        scores = scores - rules.slopes[None, :, None, None] * far
    seen = _seen(distance, last, key_positions, rules)
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    if rules.sinks is not None:
        sinks = jnp.broadcast_to(rules.sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sinks.astype(jnp.float32)], axis=-1)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    weights = weights[..., : keys.shape[2]]
    out = jnp.einsum("bhtl,bhld->bthd", weights, v.astype(jnp.float32))
    return out.astype(q.dtype)


def _before(rows: Array, value_dim: int, rules: ScoreRules, q: Array) -> Partial:
    """Attention over no keys yet: nothing, or the sinks."""
    batch, kv_heads, n, _ = rows.shape
    out = jnp.zeros((batch, kv_heads, n, value_dim), jnp.float32)
    if rules.sinks is None:
        empty = jnp.full((batch, kv_heads, n), -jnp.inf, jnp.float32)
        return Partial(out, empty, jnp.zeros_like(empty))
    per_row = jnp.broadcast_to(rules.sinks[None, None, :, None], (*q.shape[:3], 1))
    highest = _rows(per_row.astype(jnp.float32), kv_heads)[..., 0]
    return Partial(out, highest, jnp.ones_like(highest))


def _block(part: Rows, slot: Array, start: Array, q: Array, block: int) -> Array:
    """Keys or values start.. of the rows of the batch, [batch, kv_heads, block, head_dim]."""
    at = (slot, jnp.int32(0), start, jnp.int32(0))
    batch = q.shape[0]

    def cut(array: Array) -> Array:
        return lax.dynamic_slice(array, at, (batch, array.shape[1], block, array.shape[3]))

    return _as_computed(jax.tree.map(cut, part), q)


def _as_computed(part: Rows, q: Array) -> Array:
    """Decoded, and in a type for products with q."""
    if isinstance(part, QuantizedVectors):
        return part.dequantize(q.dtype)
    return part if part.dtype == q.dtype else part.astype(jnp.float32)


def _seen(distance: Array, last: Array, key_positions: Array, rules: ScoreRules) -> Array:
    """Which keys each query sees [batch, tokens, keys]."""
    seen = key_positions[None, None, :] <= last[:, :, None]
    if rules.window is not None:
        seen = seen & (distance < rules.window)
    if rules.ahead is not None:
        seen = seen & (distance > -rules.ahead)
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
    rules: ScoreRules,
) -> Partial:
    """Attention over one block of keys."""
    batch, kv_heads, n, _ = rows.shape
    tokens = positions.shape[1]
    batched = ((0, 1), (0, 1))
    scores = rules.scale * lax.dot_general(
        rows, k, (((3,), (3,)), batched), preferred_element_type=jnp.float32
    )
    scores = scores.reshape(batch, kv_heads, n // tokens, tokens, -1)
    distance = positions[:, :, None] - key_positions[None, None, :]
    if rules.softcap is not None:
        scores = rules.softcap * jnp.tanh(scores / rules.softcap)
    if rules.bias is not None:
        bias = rules.bias(distance)
        scores = scores + bias.reshape(bias.shape[0], *scores.shape[1:])
    if rules.slopes is not None:
        slopes = rules.slopes.reshape(1, kv_heads, -1, 1, 1)
        scores = scores - slopes * distance[:, None, None].astype(jnp.float32)
    seen = _seen(distance, last, key_positions, rules) & fresh[None, None, :]
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf).reshape(batch, kv_heads, n, -1)
    highest = jnp.max(scores, axis=-1)
    finite = jnp.where(jnp.isfinite(highest), highest, 0.0)
    weights = jnp.exp(scores - finite[..., None])
    out = lax.dot_general(
        weights.astype(v.dtype), v, (((3,), (2,)), batched), preferred_element_type=jnp.float32
    )
    return Partial(out, highest, jnp.sum(weights, axis=-1))


def _route(
    q: Array, keys: Rows, values: Rows | None, rules: ScoreRules
) -> Literal["cpu", "gpu", "xla"]:
    """What computes attention here: the custom call, the kernel or XLA's operations.

    The kernel takes any number of tokens: a tile of queries reads what its last one sees, and
    no scores are written to memory.
    """
    backend = jax.default_backend()
    if rules.bias is not None:
        return "xla"
    if backend == "gpu":
        return "gpu" if serves(keys) and (values is None or serves(values)) else "xla"
    plain = [q] if isinstance(keys, QuantizedVectors) else [q, keys]
    known = all(any(part.dtype == kind for kind in PLAIN.values()) for part in plain)
    fits = backend == "cpu" and known and custom.supported(q.shape[2], keys.shape[1])
    return "cpu" if fits else "xla"


def _parts(rows: Rows) -> custom.Parts:
    if isinstance(rows, QuantizedVectors):
        return custom.Parts((rows.words, rows.scales), rows.width)
    return custom.Parts((rows,), rows.shape[3])


def _with_parts(rows: Rows, parts: tuple[Array, ...]) -> Rows:
    return jax.tree.unflatten(jax.tree.structure(rows), parts)


def _coding(rows: Rows) -> custom.Coding | None:
    if not isinstance(rows, QuantizedVectors):
        return None
    format = rows.format
    return custom.Coding(format.code_bits, format.levels, format.per_code, format.symmetric)


def _scores(rules: ScoreRules) -> custom.Scores:
    return custom.Scores(
        rules.scale, rules.softcap, rules.window, rules.ahead, rules.sinks, rules.slopes
    )

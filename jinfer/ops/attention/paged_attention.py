"""Attention backends: paged attention of a flat batch, and of whole texts without a cache.

`extend` writes new tokens' keys and values to the cache and lets each token attend to its
predecessors; `attend` only reads; `attend_text` needs no cache. A custom call (CPU) or a kernel
(GPU) computes them where available, otherwise XLA.

With the custom call a token's result is batch-invariant: to the last bit it depends only on its
query, its sequence's keys and values and its position, not on the batch, prompt chunking, block
placement or the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jinfer.cpu import attention_call as custom
from jinfer.ops.attention.gpu import attend_gpu, attend_partial_gpu, kernel_supports
from jinfer.ops.attention.kv_cache import BLOCK, AttentionMetadata, KVPool, LayerCache, write_cache
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.partial_merge import PartialAttention
from jinfer.ops.attention.xla import (
    attend_partial_xla,
    attend_text_xla,
    attend_xla,
    extend_xla,
)
from jinfer.ops.backend import backend, fuses_prologue
from jinfer.quant.kv_vectors import QuantizedVectors
from jinfer.quant_format import FLOAT_DTYPES

if TYPE_CHECKING:
    from jaxtyping import Float, Int

WRITE_KV = Primitive("enter_cache")
WRITE_KV.multiple_results = True


def has_write_kernel(cache: LayerCache) -> bool:
    """Whether a kernel supports this cache here."""
    plain = isinstance(cache.keys, Array) and isinstance(cache.values, Array)
    return plain and fuses_prologue()


def write_kv(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads value_dim"],
    cache: LayerCache,
    at: AttentionMetadata,
) -> tuple[Float[Array, "tokens heads head_dim"], LayerCache]:
    """Writes to the cache as `write_cache` does; on a GPU in one kernel with the rotation of q."""
    q, keys, values = WRITE_KV.bind(q, k, v, cache.keys, cache.values, *at)
    return q, LayerCache(keys, values)


def _written(q: Array, k: Array, v: Array, *rest: Array) -> list[Any]:
    cache = write_cache(LayerCache(*rest[:2]), k, v, AttentionMetadata(*rest[2:]))
    return [q, cache.keys, cache.values]


@WRITE_KV.def_abstract_eval
def _shapes(q: Any, k: Any, v: Any, *rest: Any) -> list[Any]:
    del k, v
    return [q, *rest[:2]]


WRITE_KV.def_impl(jax.jit(_written))
mlir.register_lowering(WRITE_KV, mlir.lower_fun(_written, multiple_results=True))


def extend(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads value_dim"] | None,
    cache: LayerCache,
    at: AttentionMetadata,
    rules: ScoreRules,
) -> tuple[Float[Array, "tokens heads value_dim"], LayerCache]:
    """Writes new tokens to the cache; each then attends to its sequence up to itself.

    Args:
        k, v: keys and values of the new tokens; without v the keys are the values too, and the
            cache has no values (MLA).
        cache: donated; must not be used afterwards.
        at: positions and block tables; the output of padding is zero.

    Returns:
        The attention output, and the cache with the new tokens.
    """
    if rules.chunked:
        cache = write_cache(cache, k, k[..., :0] if v is None else v, at)
        seen = _chunk_ends(at, rules)
        return attend(q, cache.keys, cache.values, seen, at.positions, rules), cache
    route = _route(q, cache.keys, None if v is None else cache.values, rules)
    if route == "xla":
        return extend_xla(q, k, v, cache, at, rules)
    if route == "gpu":
        if v is not None and has_write_kernel(cache):
            q, cache = write_kv(q, k, v, cache, at)
        else:
            cache = write_cache(cache, k, k[..., :0] if v is None else v, at)
        written = None if v is None else cache.values
        return attend_gpu(q, cache.keys, written, at, at.positions, rules), cache
    new = (k.astype(q.dtype), *(() if v is None else (v.astype(q.dtype),)))
    values = None if v is None else cache.values
    int8_keys = cache.int8_keys
    (out,), *kept = _custom_call(q, cache.keys, values, at, at.positions, rules, new, int8_keys)
    return out, _updated_cache(cache, kept)


def extend_partial(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads value_dim"] | None,
    cache: LayerCache,
    at: AttentionMetadata,
    rules: ScoreRules,
) -> tuple[PartialAttention, LayerCache]:
    """Computes `extend` for a cache with some of a sequence's blocks; another pool has the rest.

    Table entries of blocks in the other pool are -1: they are neither written nor read.

    Args:
        rules: without sinks, which apply to the merged result.
    """
    assert rules.sinks is None, "sinks take part once, where parts are joined"
    values = None if v is None else cache.values
    route = _route(q, cache.keys, values, rules)
    if route == "cpu" and not rules.chunked:
        new = (k.astype(q.dtype), *(() if v is None else (v.astype(q.dtype),)))
        arguments = (q, cache.keys, values, at, at.positions, rules, new, cache.int8_keys)
        sums, *kept = _custom_call(*arguments, partial=True)
        return PartialAttention(*sums), _updated_cache(cache, kept)
    cache = write_cache(cache, k, k[..., :0] if v is None else v, at)
    written, seen = None if v is None else cache.values, _chunk_ends(at, rules)
    if route == "cpu":
        found = _custom_call(q, cache.keys, written, seen, at.positions, rules, partial=True)
        return PartialAttention(*found[0]), cache
    if route == "gpu":
        return attend_partial_gpu(q, cache.keys, written, seen, at.positions, rules), cache
    own = cache.keys if v is None else cache.values
    return attend_partial_xla(q, cache.keys, own, seen, at.positions, rules), cache


def _chunk_ends(at: AttentionMetadata, rules: ScoreRules) -> AttentionMetadata:
    """Returns positions whose windows begin at the tokens' chunks; unchanged without chunks."""
    if not rules.chunked:
        return at
    assert rules.window is not None, "the size of a chunk"
    return at._replace(positions=at.positions // rules.window * rules.window + rules.window - 1)


def _updated_cache(cache: LayerCache, kept: Sequence[tuple[Array, ...]]) -> LayerCache:
    """Returns the cache after the custom call."""
    keys, values, int8_keys = kept
    return LayerCache(
        _with_parts(cache.keys, keys),
        _with_parts(cache.values, values) if values else cache.values,
        int8_keys[0] if int8_keys else None,
    )


def attend_cached(
    q: Float[Array, "tokens heads head_dim"],
    cache: LayerCache,
    at: AttentionMetadata,
    rules: ScoreRules,
) -> Float[Array, "tokens heads value_dim"]:
    """Computes `extend` for a cache that has the new tokens already (KV sharing)."""
    seen = _chunk_ends(at, rules)
    return attend(q, cache.keys, cache.values, seen, at.positions, rules, cache.int8_keys)


def attend(
    q: Float[Array, "tokens heads head_dim"],
    keys: KVPool,
    values: KVPool | None,
    at: AttentionMetadata,
    last: Int[Array, " tokens"],
    rules: ScoreRules,
    int8_keys: Array | None = None,
) -> Float[Array, "tokens heads value_dim"]:
    """Computes attention over cached keys and values. A query that sees no key gets zeros.

    Args:
        q: queries; query head h reads key head h * kv_heads // heads.
        keys, values: [blocks, kv_heads, size, head_dim]; entry j of a block table is the block of
            positions j * size .. (j + 1) * size - 1. Without values the keys are the values too.
        at: positions and block tables of the queries.
        last: the last position each query sees; its own position if attention is causal.
        int8_keys: of `LayerCache`.
    """
    route = _route(q, keys, values, rules)
    if route == "cpu":
        return _custom_call(q, keys, values, at, last, rules, int8_keys=int8_keys)[0][0]
    if route == "gpu":
        return attend_gpu(q, keys, values, at, last, rules)
    return attend_xla(q, keys, keys if values is None else values, at, last, rules)


def attend_text(
    q: Float[Array, "batch tokens heads head_dim"],
    k: Float[Array, "batch tokens kv_heads head_dim"],
    v: Float[Array, "batch tokens kv_heads value_dim"],
    lengths: Int[Array, " batch"],
    rules: ScoreRules,
) -> Float[Array, "batch tokens heads value_dim"]:
    """Computes bidirectional attention of whole texts.

    Args:
        lengths: tokens of each text; the tokens after are padding, masked and with zero output.
    """
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    route = _route(q, k, v, rules)
    if route == "xla":
        return attend_text_xla(q, k, v, lengths, rules)
    if route == "gpu":
        return _attend_text_in_blocks(q, k, v, lengths, rules)
    # Each text is one block.
    at, last = _text_metadata(lengths, q.shape[1], jnp.arange(q.shape[0], dtype=jnp.int32)[:, None])
    flat = q.reshape(-1, *q.shape[2:])
    return _custom_call(flat, k, v, at, last, rules)[0][0].reshape(*q.shape[:3], -1)


def _attend_text_in_blocks(
    q: Array, k: Array, v: Array, lengths: Array, rules: ScoreRules
) -> Array:
    """Computes `attend_text` by the GPU kernel, with texts as sequences of a paged pool."""
    batch, tokens, heads, _ = q.shape
    blocks = -(-tokens // BLOCK)

    def pool(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, blocks * BLOCK - tokens), (0, 0)))
        cut = padded.reshape(batch, x.shape[1], blocks, BLOCK, x.shape[3])
        return cut.swapaxes(1, 2).reshape(batch * blocks, x.shape[1], BLOCK, x.shape[3])

    tables = jnp.arange(batch * blocks, dtype=jnp.int32).reshape(batch, blocks)
    at, last = _text_metadata(lengths, tokens, tables)
    out = attend_gpu(q.reshape(batch * tokens, heads, -1), pool(k), pool(v), at, last, rules)
    return out.reshape(*q.shape[:3], -1)


def _text_metadata(lengths: Array, tokens: int, tables: Array) -> tuple[AttentionMetadata, Array]:
    """Returns attention metadata of whole texts, and the last position each token sees."""
    batch = lengths.shape[0]
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
    text = jnp.arange(batch, dtype=jnp.int32)[:, None]
    rows = jnp.where(positions < lengths[:, None], text, -1)
    last = jnp.broadcast_to(lengths[:, None] - 1, positions.shape)
    return AttentionMetadata(rows.ravel(), positions.ravel(), tables), last.ravel()


def _route(
    q: Array, keys: KVPool, values: KVPool | None, rules: ScoreRules
) -> Literal["cpu", "gpu", "xla"]:
    """Chooses the implementation of attention: custom call, GPU kernel or XLA.

    The kernel takes any number of tokens: a tile of queries reads the keys that its last query
    sees, and writes no scores to memory.
    """
    here = backend()
    if rules.bias is not None:
        return "xla"
    if here == "gpu":
        return "gpu" if kernel_supports(keys, values) else "xla"
    kv_heads = keys.shape[1]
    plain = [q] if isinstance(keys, QuantizedVectors) else [q, keys]
    known = all(any(part.dtype == kind for kind in FLOAT_DTYPES.values()) for part in plain)
    fits = here == "cpu" and known and custom.supported(q.shape[-2], kv_heads)
    return "cpu" if fits else "xla"


def _custom_call(
    q: Array,
    keys: KVPool,
    values: KVPool | None,
    at: AttentionMetadata,
    last: Array,
    rules: ScoreRules,
    new: tuple[Array, ...] | None = None,
    int8_keys: Array | None = None,
    *,
    partial: bool = False,
) -> tuple[tuple[Array, ...], tuple[Array, ...], tuple[Array, ...], tuple[Array, ...]]:
    """Returns the custom call's results, and the arrays of keys, values and int8 keys."""
    coding = None
    if isinstance(keys, QuantizedVectors):
        format = keys.format
        coding = custom.KvFormat(format.code_bits, format.levels, format.per_code, format.symmetric)
    scores = custom.Scores(
        rules.scale,
        rules.softcap,
        rules.window,
        rules.ahead,
        rules.sinks,
        rules.slopes,
        rules.by_distance,
        rules.lowest,
    )
    parts = _parts(keys), None if values is None else _parts(values)
    ranges = (*at[:2], last, at.tables)
    return custom.attention(q, *ranges, *parts, coding, scores, new, int8_keys, partial=partial)


def _parts(rows: KVPool) -> custom.CacheOperands:
    if isinstance(rows, QuantizedVectors):
        return custom.CacheOperands((rows.words, rows.scales), rows.width)
    return custom.CacheOperands((rows,), rows.shape[3])


def _with_parts(rows: KVPool, parts: tuple[Array, ...]) -> KVPool:
    return jax.tree.unflatten(jax.tree.structure(rows), parts)

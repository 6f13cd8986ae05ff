"""Sparse attention: each query attends to the keys that an indexer chooses (DeepSeek-V3.2).

A key's index score is the sum over the indexer's heads of weight * relu(query . key), in float32
(arXiv 2512.02556). A query sees the `top_k` keys with the highest scores of its own position and
those before; of equal scores the earlier position comes first. They are gathered in the order of
their positions, and `paged_attention.attend` computes attention to them: with at most `top_k` keys
the result equals attention to all keys, to the last bit.

Scores have no positive factor, which would not change the choice. DeepSeek's own code rotates
queries and keys by a Hadamard transform, to round them to FP8; here they are rotated only if the
cache is quantized (`jinfer.ops.attention.hadamard`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.ops.attention.hadamard import rotate_qk
from jinfer.ops.attention.kv_cache import (
    BLOCK,
    AttentionMetadata,
    IndexedCache,
    KVPool,
    LayerCache,
    write_vectors,
)
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.paged_attention import attend, extend
from jinfer.ops.attention.xla import dequantize_for
from jinfer.ops.backend import needs_derivatives
from jinfer.ops.matmul.dense import matmul_per_head

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_TILE = 8  # tokens whose keys are gathered at a time
_BLOCKS_PER_STEP = 4  # blocks of keys that are scored at a time


class IndexQuery(NamedTuple):
    """An indexer's results for new tokens.

    Attributes:
        queries: of each head.
        keys: which all heads share.
        weights: of the heads.
        top_k: how many keys are chosen.
    """

    queries: Float[Array, "tokens index_heads dim"]
    keys: Float[Array, "tokens 1 dim"]
    weights: Float[Array, "tokens index_heads"]
    top_k: int

    def select_rows(self, tokens: Int[Array, " places"]) -> IndexQuery:
        """Selects some of the tokens."""
        queries, keys, weights, top_k = self
        return IndexQuery(queries[tokens], keys[tokens], weights[tokens], top_k)


def extend_sparse(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads value_dim"] | None,
    index: IndexQuery | None,
    cache: IndexedCache,
    at: AttentionMetadata,
    rules: ScoreRules,
) -> tuple[Float[Array, "tokens heads value_dim"], IndexedCache]:
    """Computes `paged_attention.extend` with attention to the keys chosen for each token.

    Args:
        index: the scores' operands; None: `cache.chosen` has the keys.
        rules: scores that do not depend on distances.

    Returns:
        The output, and the cache with the new tokens and the chosen keys.
    """
    top_k = _chosen_width(index, cache, at)
    if not top_k:
        out, vectors = extend(q, k, v, cache.vectors, at, rules)
        none = jnp.zeros((q.shape[0], 0), jnp.int32)
        return out, cache._replace(vectors=vectors, chosen=none)
    if index is not None and cache.index_keys is not None:
        queries, own = rotate_qk(index.queries, index.keys, cache.index_keys)
        index = index._replace(queries=queries)
        (index_keys,) = write_vectors((cache.index_keys,), (own,), at)
        cache = cache._replace(index_keys=index_keys)
    new = k, k[..., :0] if v is None else v
    keys, values = write_vectors(cache.vectors[:2], new, at)
    cache = cache._replace(vectors=LayerCache(keys, values))

    def to_all() -> tuple[Array, Array]:
        out = attend(q, keys, None if v is None else values, at, at.positions, rules)
        return out, jnp.zeros((q.shape[0], top_k), jnp.int32)

    def to_some() -> tuple[Array, Array]:
        return _attend_in_tiles(q, index, cache, at, rules, latent=v is None)

    longest = jnp.max(jnp.where(at.rows >= 0, at.positions, -1))
    out, chosen = lax.cond(longest < top_k, to_all, to_some)
    return out, cache._replace(chosen=chosen)


def _chosen_width(index: IndexQuery | None, cache: IndexedCache, at: AttentionMetadata) -> int:
    """Returns the number of keys chosen for a token; 0: all, as no sequence is longer."""
    if index is not None:
        return 0 if at.tables.shape[1] * BLOCK <= index.top_k else index.top_k
    assert cache.chosen is not None, "an attention without an indexer uses the keys of another"
    return cache.chosen.shape[1]


def _attend_in_tiles(
    q: Array,
    index: IndexQuery | None,
    cache: IndexedCache,
    at: AttentionMetadata,
    rules: ScoreRules,
    *,
    latent: bool,
) -> tuple[Array, Array]:
    """Computes attention tile by tile; the chosen keys of a tile's tokens are gathered at once.

    Returns:
        The output, and the chosen keys.
    """
    tokens = q.shape[0]
    size = min(_TILE, tokens)
    count = -(-tokens // size)

    def tiles(x: Array, fill: int = 0) -> Array:
        rest = [(0, count * size - tokens)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, rest, constant_values=fill).reshape(count, size, *x.shape[1:])

    def attend_tile(tile: tuple[Array, ...]) -> tuple[Array, Array]:
        q, rows, positions, *choice = tile
        own = AttentionMetadata(rows, positions, at.tables)
        chosen = choice[0]
        if index is not None and cache.index_keys is not None:
            queries, weights = choice
            chosen = choose_keys(queries, weights, index.top_k, cache.index_keys, own)
        return _attend_chosen(q, chosen, cache.vectors, own, rules, latent=latent), chosen

    choice = (index.queries, index.weights) if index is not None else (cache.chosen,)
    parts = (tiles(part) for part in (at.positions, *choice) if part is not None)
    operands = tiles(q), tiles(at.rows, -1), *parts
    found = lax.map(attend_tile, operands)
    out, chosen = (x.reshape(count * size, *x.shape[2:])[:tokens] for x in found)
    return out, chosen


def choose_keys(
    queries: Float[Array, "tokens index_heads dim"],
    weights: Float[Array, "tokens index_heads"],
    top_k: int,
    keys: KVPool,
    at: AttentionMetadata,
) -> Int[Array, "tokens top_k"]:
    """Returns the positions of the chosen keys, at most top_k, in rising order.

    If a token sees fewer, positions that it must not see follow.

    Args:
        keys: the pool of index keys.
    """
    if needs_derivatives():  # a choice has no derivative
        queries, weights, keys = lax.stop_gradient((queries, weights, keys))
    width = _BLOCKS_PER_STEP * BLOCK
    steps = -(-at.tables.shape[1] // _BLOCKS_PER_STEP)
    tables = at.tables.at[jnp.maximum(at.rows, 0)].get(mode="clip")
    last = jnp.where(at.rows >= 0, at.positions, -1)

    def step(number: Array, scores: Array) -> Array:
        entries = number * _BLOCKS_PER_STEP + lax.iota(jnp.int32, _BLOCKS_PER_STEP)
        blocks = tables.at[:, entries].get(mode="clip")
        own = jax.tree.map(lambda pool: pool.at[blocks, 0].get(mode="clip"), keys)
        found = _index_scores(queries, weights, dequantize_for(own, queries))
        here = number * width + lax.iota(jnp.int32, width)
        found = jnp.where(here[None] <= last[:, None], found, -jnp.inf)
        return lax.dynamic_update_slice_in_dim(scores, found, number * width, axis=1)

    nothing = jnp.full((queries.shape[0], steps * width), -jnp.inf, jnp.float32)
    scores = lax.fori_loop(0, jnp.max(last) // width + 1, step, nothing)
    return jnp.sort(lax.top_k(scores, top_k)[1].astype(jnp.int32), axis=1)


def _index_scores(
    queries: Float[Array, "tokens index_heads dim"],
    weights: Float[Array, "tokens index_heads"],
    blocks: Float[Array, "tokens blocks size dim"],
) -> Float[Array, "tokens keys"]:
    """Computes the scores of the keys of each token's sequence; batch-invariant."""
    keys = blocks.reshape(blocks.shape[0], -1, blocks.shape[3])
    products = matmul_per_head(queries.swapaxes(0, 1), keys, slice(None))
    positive = jnp.maximum(products, 0.0).swapaxes(0, 1)
    scores = matmul_per_head(weights[None], positive, slice(None), transposed=True)[0]
    # A sort puts -0 before 0 and NaN at either end; here -0 equals 0 and NaN is the largest.
    scores = jnp.where(scores == 0, 0.0, scores)
    return jnp.where(jnp.isnan(scores), jnp.inf, scores)


def _attend_chosen(
    q: Float[Array, "tokens heads head_dim"],
    chosen: Int[Array, "tokens top_k"],
    cache: LayerCache,
    at: AttentionMetadata,
    rules: ScoreRules,
    *,
    latent: bool,
) -> Float[Array, "tokens heads value_dim"]:
    """Computes attention to the keys at these positions alone."""
    tokens, top_k = chosen.shape
    blocks = -(-top_k // BLOCK)
    chosen = jnp.pad(chosen, ((0, 0), (0, blocks * BLOCK - top_k)))
    tables = at.tables.at[jnp.maximum(at.rows, 0)].get(mode="clip")
    block = jnp.take_along_axis(tables, chosen // BLOCK, axis=1, mode="clip")

    def gathered(pool: Array) -> Array:
        own = pool.at[block, :, chosen % BLOCK].get(mode="clip")  # [tokens, keys, kv_heads, ...]
        own = own.reshape(tokens * blocks, BLOCK, *own.shape[2:])
        return own.swapaxes(1, 2)

    keys = jax.tree.map(gathered, cache.keys)
    values = None if latent else jax.tree.map(gathered, cache.values)
    rows = jnp.where(at.rows >= 0, lax.iota(jnp.int32, tokens), -1)
    last = jnp.clip(at.positions, 0, top_k - 1)
    own_tables = lax.iota(jnp.int32, tokens * blocks).reshape(tokens, blocks)
    return attend(q, keys, values, AttentionMetadata(rows, last, own_tables), last, rules)

"""Sparse attention: keys that an indexer chooses, against NumPy and against attention to all."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.ops.attention import sparse
from jinfer.ops.attention.kv_cache import (
    AttentionMetadata,
    CacheShape,
    IndexedCache,
    nbytes,
    zero_cache,
)
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.paged_attention import extend
from jinfer.ops.attention.sparse import IndexQuery, extend_sparse
from jinfer.quant_format import parse_cache_dtype
from tests.arrays import on_device
from tests.reference.numpy_blocks import Floats, chosen_keys

from .paged import SCALE, Run, attended, blocks_of, decoded, f32, placed, random, tables_of

LENGTHS = (300, 0, 90)  # more and less than are scored at a time, and than are chosen
DIM, VALUE, HEADS, INDEX_HEADS, INDEX_DIM = 24, 16, 4, 3, 16
TOP_K = 70


@partial(jax.jit, static_argnums=(0, 1))
def extended(
    latent: bool, top_k: int | None, cache: IndexedCache, at: AttentionMetadata, *arrays: Any
) -> tuple[Any, IndexedCache]:
    """Sparse attention; without top_k attention to all."""
    q, k, v, queries, keys, weights = arrays
    v, rules = None if latent else v, ScoreRules(SCALE)
    if top_k is None:
        out, vectors = extend(q, k, v, cache.vectors, at, rules)
        return out, cache._replace(vectors=vectors)
    return extend_sparse(q, k, v, IndexQuery(queries, keys, weights, top_k), cache, at, rules)


class Texts:
    """Sequences, their queries and what their indexer computes, all of them known."""

    def __init__(self, lengths: Sequence[int], kv_heads: int, latent: bool, seed: int = 3) -> None:
        self.lengths, self.kv_heads, self.latent = lengths, kv_heads, latent
        self.tables, total = tables_of(lengths, width=6), sum(lengths)
        self.starts = np.cumsum([0, *lengths])[:-1]
        self.q, self.k = random(seed, total, HEADS, DIM), random(seed + 1, total, kv_heads, DIM)
        self.v = self.k if latent else random(seed + 2, total, kv_heads, VALUE)
        self.index_q = random(seed + 3, total, INDEX_HEADS, INDEX_DIM)
        self.index_k = random(seed + 4, total, 1, INDEX_DIM)
        # The same key thrice in a row: equal scores, of which the earlier ones come first.
        self.index_k = np.repeat(self.index_k[::3], 3, axis=0)[:total]
        self.weights = random(seed + 5, total, INDEX_HEADS)

    def cache(self, kind: str = "f32") -> IndexedCache:
        values = 0 if self.latent else VALUE
        shape = CacheShape(self.kv_heads, DIM, values, index_dim=INDEX_DIM)
        cache: IndexedCache = zero_cache(
            {"a": shape}, blocks_of(self.lengths), parse_cache_dtype(kind)
        )["a"]
        return cache

    def computed(
        self, runs: Sequence[Run], cache: IndexedCache, top_k: int | None = TOP_K
    ) -> tuple[Floats, IndexedCache]:
        """These runs in one pass; without top_k attention to all."""
        at = placed(runs, self.tables)
        which = np.concatenate([
            np.zeros(run.length, int) if run.row < 0 else
            self.starts[run.row] + run.start + np.arange(run.length) for run in runs
        ])  # fmt: skip
        arrays = (self.q, self.k, self.v, self.index_q, self.index_k, self.weights)
        given = (f32(part[which]) for part in arrays)
        out, cache = extended(self.latent, top_k, cache, at, *given)
        return np.asarray(out), cache

    def expected(self, row: int, position: int, cache: IndexedCache) -> Floats:
        """Of one token, by the definition, over what the cache says."""
        blocks = self.tables[row, : -(-self.lengths[row] // 64)]

        def of(pool: Any) -> Floats:
            rows = decoded(pool).swapaxes(1, 2)[blocks]
            return rows.reshape(-1, *rows.shape[2:])[: position + 1]

        t = self.starts[row] + position
        keys, values = of(cache.vectors.keys), of(cache.vectors[0 if self.latent else 1])
        chosen = chosen_keys(
            self.index_q[t], self.weights[t], self.index_k[self.starts[row] :][: position + 1, 0],
            TOP_K,
        )  # fmt: skip
        return np.stack([
            attended(self.q[t, head], keys[chosen][:, 0], values[chosen][:, 0], 0, 10**6, head)
            for head in range(HEADS)
        ])  # fmt: skip


def everything(lengths: Sequence[int]) -> list[Run]:
    return [Run(row, 0, length) for row, length in enumerate(lengths) if length]


@pytest.mark.parametrize("latent", [True, False])
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_result_equals_the_definition(latent: bool, kind: str) -> None:
    texts = Texts(LENGTHS, 1, latent)
    out, cache = texts.computed([*everything(LENGTHS), Run(-1, 0, 3)], texts.cache(kind))
    for row, position in ((0, 0), (0, 69), (0, 70), (0, 299), (2, 89)):
        got = out[texts.starts[row] + position]
        target = texts.expected(row, position, cache)
        np.testing.assert_allclose(got, target, rtol=0, atol=2e-5 if kind == "f32" else 2e-3)
    assert not out[-3:].any()


@pytest.mark.parametrize("kind", ["f32", "q4"])
def test_chunks_are_batch_invariant(kind: str) -> None:
    """Alone, token by token and in pieces among others: the same bits."""
    texts = Texts(LENGTHS, 2, latent=False)
    whole, _ = texts.computed(everything(LENGTHS), texts.cache(kind))
    cache, done = texts.cache(kind), [0, 0, 0]
    for pieces in ((60, 40), (99, 1), (90, 10), (48, 36), (1, 1), (1, 1), (1, 1)):
        runs = [Run(row, done[row], size) for row, size in zip((0, 2), pieces, strict=True)]
        done = [done[0] + pieces[0], 0, done[2] + pieces[1]]
        padding = Run(-1, 0, (100 if sum(pieces) > 2 else 3) - sum(pieces))
        out, cache = texts.computed([runs[1], padding, runs[0]], cache)
        for run, got in ((runs[1], out[: pieces[1]]), (runs[0], out[-pieces[0] :])):
            first = texts.starts[run.row] + run.start
            assert np.array_equal(got, whole[first : first + run.length])
    assert done == list(LENGTHS)


def test_few_keys_are_all_chosen() -> None:
    """Where there are no more keys than are chosen: attention to all, to the last bit."""
    texts = Texts(LENGTHS, 2, latent=False)
    runs = everything(LENGTHS)
    dense, _ = texts.computed(runs, texts.cache(), None)
    some, _ = texts.computed(runs, texts.cache(), 300)  # fewer than tables have room for
    nothing_to_choose, cache = texts.computed(runs, texts.cache(), 6 * 64)
    assert np.array_equal(dense, some)
    assert np.array_equal(dense, nothing_to_choose)
    assert not cache.index_keys.any()  # type: ignore[union-attr]
    # The first tokens of a text of which later ones have more than are chosen.
    few, _ = texts.computed(runs, texts.cache())
    assert np.array_equal(dense[:TOP_K], few[:TOP_K])
    assert not np.array_equal(dense[TOP_K:300], few[TOP_K:300])


def test_nan_index_scores() -> None:
    """A token chooses no later token, for any scores."""
    queries, weights = np.ones((2, 1, 4)), np.full((2, 1), np.nan)
    pool, table = f32(random(1, 2, 1, 64, 4)), on_device(np.array([[1, 0]], np.int32))
    at = AttentionMetadata(on_device(np.zeros(2, np.int32)), on_device(np.array([5, 90])), table)
    chosen = jax.jit(sparse.choose_keys, static_argnums=2)(f32(queries), f32(weights), 8, pool, at)
    assert np.asarray(chosen).tolist() == [list(range(8)), list(range(8))]
    signs = jax.jit(sparse.choose_keys, static_argnums=2)(
        f32(queries), f32(-np.ones((2, 1))), 8, -jnp.abs(pool), at
    )
    assert np.asarray(signs).tolist() == [list(range(8)), list(range(8))]  # all of them are -0


def test_the_cache_is_changed_in_place() -> None:
    """Written to and read, through all of its ways, without a copy of it."""
    shape = CacheShape(2, 64, 64, index_dim=64)
    cache = zero_cache({"a": shape}, 256, jnp.float32)["a"]
    at = placed([Run(0, 100), Run(1, 300)], tables_of([101, 301], width=32))
    x, index = (
        jnp.ones((2, 2, 64)),
        IndexQuery(jnp.ones((2, 4, 64)), jnp.ones((2, 1, 64)), jnp.ones((2, 4)), 8),
    )

    def step(cache: IndexedCache, x: Any, at: AttentionMetadata) -> Any:
        return extend_sparse(x, x, x, index, cache, at, ScoreRules(SCALE))

    lowered = jax.jit(step, donate_argnums=0).lower(cache, x, at)
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == nbytes(cache)
    assert memory.temp_size_in_bytes < cache.vectors.keys.nbytes / 4

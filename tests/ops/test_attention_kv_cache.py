"""The paged cache: what `write_cache` puts where, and that a donated cache stays where it is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.typing import DTypeLike
from numpy.testing import assert_allclose

from jinfer.ops.attention.kv_cache import (
    BLOCK,
    AttentionMetadata,
    Cache,
    CacheShape,
    LayerCache,
    nbytes,
    write_cache,
    zero_cache,
)
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.attention.paged_attention import attend
from tests.arrays import on_device
from tests.ops.attention_reference import attend_reference
from tests.ops.paged import Run, placed, tables_of

BLOCKS, KV_HEADS, HEAD_DIM = 6, 2, 8
SHAPE = CacheShape(KV_HEADS, HEAD_DIM, HEAD_DIM)


def tokens(seed: int, count: int) -> np.ndarray:
    shape = (count, KV_HEADS, HEAD_DIM)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def full(dtype: DTypeLike = jnp.float32) -> LayerCache:
    """A cache of which no two numbers are equal."""
    shape = (2, BLOCKS, KV_HEADS, BLOCK, HEAD_DIM)
    keys, values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return LayerCache(on_device(keys, dtype), on_device(values, dtype))


def test_empty() -> None:
    shapes = {
        "decoder.0.attn": CacheShape(2, 8, 8),
        "decoder.1.attn": CacheShape(1, 4, 0),
        "decoder.1.cross": CacheShape(4, 8, 6, "encoder"),
    }
    blocks = {"decoder.0.attn": 3, "decoder.1.attn": 2, "decoder.1.cross": 1}
    cache = zero_cache(shapes, blocks, jnp.bfloat16)
    assert {name: (k.shape, v.shape) for name, (k, v, _) in cache.items()} == {
        "decoder.0.attn": ((3, 2, BLOCK, 8), (3, 2, BLOCK, 8)),
        "decoder.1.attn": ((2, 1, BLOCK, 4), (2, 1, BLOCK, 0)),
        "decoder.1.cross": ((1, 4, BLOCK, 8), (1, 4, BLOCK, 6)),
    }
    leaves = jax.tree.leaves(cache)
    assert all(leaf.dtype == jnp.bfloat16 and not leaf.any() for leaf in leaves)
    assert nbytes(cache) == 2 * BLOCK * (3 * 2 * (8 + 8) + 2 * 4 + 4 * (8 + 6))
    assert {k.shape[0] for k, *_ in zero_cache(shapes, 5, jnp.bfloat16).values()} == {5}


@pytest.mark.parametrize(
    "runs",
    [
        [Run(0, 0), Run(1, 5), Run(2, 130), Run(3, 3)],  # a decoding step
        [Run(2, 4, 140)],  # a chunk of a prompt, over three blocks
        [Run(3, 0, BLOCK), Run(-1, 0, 7), Run(0, BLOCK - 2, 2), Run(-1, 3)],
    ],
)
def test_write(runs: list[Run]) -> None:
    """Exactly the places asked for change; padding changes none."""
    tables = tables_of([64, 64, 192, 64])
    old, count = full(), sum(run.length for run in runs)
    keys, values = tokens(1, count), tokens(2, count)
    at = placed(runs, tables)
    new = jax.jit(write_cache)(old, on_device(keys), on_device(values), at)
    for got, before, given in zip(new[:2], old[:2], (keys, values), strict=True):
        expected, t = np.array(before), 0
        for run in runs:
            for position in range(run.start, run.start + run.length):
                if run.row >= 0:
                    block = tables[run.row, position // BLOCK]
                    expected[block, :, position % BLOCK] = given[t]
                t += 1
        assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    "at",
    [
        AttentionMetadata(on_device([0]), on_device([BLOCK]), on_device([[1]])),  # beyond the table
        AttentionMetadata(on_device([0]), on_device([-1]), on_device([[1]])),
        AttentionMetadata(on_device([7]), on_device([3]), on_device([[1]])),  # no such row
        AttentionMetadata(on_device([0]), on_device([3]), on_device([[BLOCKS]])),  # no such block
    ],
    ids=["beyond", "before", "row", "block"],
)
def test_tokens_without_a_block_are_dropped(at: AttentionMetadata) -> None:
    old = full()
    new = write_cache(old, on_device(tokens(1, 1)), on_device(tokens(2, 1)), at)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        assert np.array_equal(a, b)


def test_write_takes_the_type_of_the_cache() -> None:
    at = placed([Run(0, 0, 2)], np.array([[1]], np.int32))
    new = write_cache(full(jnp.bfloat16), on_device(tokens(1, 2)), on_device(tokens(2, 2)), at)
    assert isinstance(new.keys, Array)
    assert isinstance(new.values, Array)
    assert new.keys.dtype == new.values.dtype == jnp.bfloat16
    written = np.asarray(new.keys[1, :, :2], np.float32)
    assert_allclose(written, tokens(1, 2).swapaxes(0, 1), rtol=2**-8)


def test_write_into_half_precision_stays_finite() -> None:
    """As large as a float16 can be, but not infinite; NaN stays."""
    at = placed([Run(0, 0, 3)], np.array([[0]], np.int32))
    new = jnp.broadcast_to(on_device([1e6, -1e6, jnp.nan])[:, None, None], (3, KV_HEADS, HEAD_DIM))
    keys = jax.tree.leaves(write_cache(full(jnp.float16), new, new, at))[0]
    got = np.asarray(keys[0, :, :3], np.float32)
    assert np.array_equal(got[:, 0], np.full((KV_HEADS, HEAD_DIM), 65504.0))
    assert np.array_equal(got[:, 1], np.full((KV_HEADS, HEAD_DIM), -65504.0))
    assert np.isnan(got[:, 2]).all()


def compiled_step(cache: Cache, attention: Any) -> tuple[Any, Any, int]:
    """A decoding step through every layer of a donated cache: the program, its arguments and
    the bytes of its temporary memory, which would hold a copy of a cache."""

    def step(cache: Cache, x: Array, at: AttentionMetadata) -> tuple[Cache, Array]:
        after = {}
        for name, layer in cache.items():
            after[name] = write_cache(layer, x, x, at)
            x = attention(x, *after[name][:2], at, at.positions, ScoreRules(scale=1.0))
        return after, x

    dtype = jax.tree.leaves(cache)[0].dtype
    x = jnp.ones((4, KV_HEADS, HEAD_DIM), dtype)
    at = placed([Run(0, 3), Run(1, 5), Run(2, 0), Run(3, 9)], np.eye(4, dtype=np.int32))
    program = jax.jit(step, donate_argnums=0).lower(cache, x, at).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == nbytes(cache)
    return program, (cache, x, at), memory.temp_size_in_bytes


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_donated_cache_is_changed_in_place(dtype: DTypeLike) -> None:
    """Written to and read in one program: no second cache, and no copy on the way."""
    cache = zero_cache({"a": SHAPE, "b": SHAPE}, 256, dtype)
    program, arguments, temporary = compiled_step(cache, attend)
    assert temporary < cache["a"].keys.nbytes / 2
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    after, _ = program(*arguments)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == places
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))


def test_reader_of_the_whole_cache_causes_no_copy() -> None:
    """Such a reader needs temporary memory itself, but not more of it with every layer."""
    caches = [zero_cache(dict.fromkeys(n, SHAPE), 256, jnp.bfloat16) for n in ("a", "abc")]
    one, three = (compiled_step(cache, attend_reference)[2] for cache in caches)
    assert three - one < caches[0]["a"].keys.nbytes / 2

"""The cache: what `write` puts where, and that a donated cache stays where it is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.typing import DTypeLike
from numpy.testing import assert_allclose

from jinfer.ops.attention import attend, attend_reference
from jinfer.ops.cache import Cache, CacheShape, LayerCache, empty, nbytes, write
from jinfer.ops.score_rules import ScoreRules

SLOTS, KV_HEADS, LENGTH, HEAD_DIM = 4, 2, 16, 8
SHAPE = CacheShape(KV_HEADS, HEAD_DIM, HEAD_DIM)


def tokens(seed: int, batch: int, count: int) -> np.ndarray:
    shape = (batch, count, KV_HEADS, HEAD_DIM)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def filled(dtype: DTypeLike = jnp.float32) -> LayerCache:
    """A cache of which no two numbers are equal."""
    shape = (2, SLOTS, KV_HEADS, LENGTH, HEAD_DIM)
    keys, values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return LayerCache(jnp.asarray(keys, dtype), jnp.asarray(values, dtype))


def test_empty() -> None:
    shapes = {
        "decoder.0.attn": CacheShape(2, 8, 8),
        "decoder.1.attn": CacheShape(1, 4, 0),
        "decoder.1.cross": CacheShape(4, 8, 6, "encoder"),
    }
    cache = empty(shapes, 3, 10, 5, jnp.bfloat16)
    assert {name: (k.shape, v.shape) for name, (k, v) in cache.items()} == {
        "decoder.0.attn": ((3, 2, 10, 8), (3, 2, 10, 8)),
        "decoder.1.attn": ((3, 1, 10, 4), (3, 1, 10, 0)),
        "decoder.1.cross": ((3, 4, 5, 8), (3, 4, 5, 6)),
    }
    leaves = jax.tree.leaves(cache)
    assert all(leaf.dtype == jnp.bfloat16 and not leaf.any() for leaf in leaves)
    assert nbytes(cache) == 2 * 3 * (10 * 2 * (8 + 8) + 10 * 4 + 5 * 4 * (8 + 6))


@pytest.mark.parametrize(
    ("slot", "count", "starts"),
    [
        (0, 1, [0, 5, 15, 3]),  # a decoding step: all slots, each at its own place
        (2, 6, [4]),  # a chunk of a prompt
        (3, LENGTH, [0]),
        (1, 2, [LENGTH - 2, 0]),
    ],
)
def test_write(slot: int, count: int, starts: list[int]) -> None:
    """Exactly the places asked for change, in exactly the rows."""
    old = filled()
    keys, values = tokens(1, len(starts), count), tokens(2, len(starts), count)
    new = jax.jit(write)(old, keys, values, np.array(starts, np.int32), np.int32(slot))
    for got, before, given in zip(new, old, (keys, values), strict=True):
        wanted = np.array(before)
        for b, start in enumerate(starts):
            wanted[slot + b, :, start : start + count] = given[b].swapaxes(0, 1)
        assert np.array_equal(got, wanted)


def test_write_takes_the_type_of_the_cache() -> None:
    new = write(
        filled(jnp.bfloat16),
        jnp.asarray(tokens(1, 1, 2)),
        jnp.asarray(tokens(2, 1, 2)),
        jnp.zeros(1, jnp.int32),
        jnp.int32(1),
    )
    assert isinstance(new.keys, Array)
    assert isinstance(new.values, Array)
    assert new.keys.dtype == new.values.dtype == jnp.bfloat16
    written = np.asarray(new.keys[1, :, :2], np.float32)
    assert_allclose(written, tokens(1, 1, 2)[0].swapaxes(0, 1), rtol=2**-8)


def compiled_step(
    cache: Cache, attention: Callable[..., Array]
) -> tuple[Callable[..., tuple[Cache, Array]], Any, int]:
    """A decoding step through every layer of a donated cache: the program, its arguments and
    the bytes of its temporary memory, which would hold a copy of a cache."""

    def step(cache: Cache, x: Array, at: Array) -> tuple[Cache, Array]:
        after, here = {}, at[:, None]
        for name, layer in cache.items():
            after[name] = write(layer, x, x, at, jnp.int32(0))
            x = attention(x, *after[name], here, here, jnp.int32(0), ScoreRules(scale=1.0))
        return after, x

    dtype = jax.tree.leaves(cache)[0].dtype
    x = jnp.ones((SLOTS, 1, KV_HEADS, HEAD_DIM), dtype)
    arguments = (cache, x, jnp.array([3, 5, 0, 9], jnp.int32))
    program = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == nbytes(cache)
    return program, arguments, memory.temp_size_in_bytes


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_donated_cache_is_changed_in_place(dtype: DTypeLike) -> None:
    """Written to and read in one program: no second cache, and no copy on the way."""
    cache = empty({"a": SHAPE, "b": SHAPE}, SLOTS, 4096, 0, dtype)
    program, arguments, temporary = compiled_step(cache, attend)
    assert temporary < cache["a"].keys.nbytes / 2
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    after, _ = program(*arguments)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == places
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))


def test_a_reader_of_the_whole_cache_does_not_have_it_copied() -> None:
    """Such a reader needs temporary memory itself, but not more of it with every layer."""
    caches = [empty(dict.fromkeys(n, SHAPE), SLOTS, 4096, 0, jnp.bfloat16) for n in ("a", "abc")]
    one, three = (compiled_step(cache, attend_reference)[2] for cache in caches)
    assert three - one < caches[0]["a"].keys.nbytes / 2

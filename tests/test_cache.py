"""The cache: what `write` puts where, and that a donated cache stays where it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.typing import DTypeLike
from numpy.testing import assert_allclose

from jinfer.cache import LayerCache, empty, nbytes, write
from jinfer.ops.attention import attend

SLOTS, KV_HEADS, LENGTH, HEAD_DIM = 4, 2, 16, 8


def tokens(seed: int, batch: int, count: int) -> np.ndarray:
    shape = (batch, count, KV_HEADS, HEAD_DIM)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def filled(dtype: DTypeLike = jnp.float32) -> LayerCache:
    """A cache of which no two numbers are equal."""
    shape = (2, SLOTS, KV_HEADS, LENGTH, HEAD_DIM)
    keys, values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return LayerCache(jnp.asarray(keys, dtype), jnp.asarray(values, dtype))


def test_empty() -> None:
    cache = empty({"decoder.0.attn": (2, 8), "decoder.1.attn": (1, 4)}, 3, 10, jnp.bfloat16)
    assert cache["decoder.0.attn"].keys.shape == (3, 2, 10, 8)
    assert cache["decoder.1.attn"].values.shape == (3, 1, 10, 4)
    leaves = jax.tree.leaves(cache)
    assert all(leaf.dtype == jnp.bfloat16 and not leaf.any() for leaf in leaves)
    assert nbytes(cache) == 2 * (2 * 8 + 1 * 4) * 3 * 10 * 2


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
    assert new.keys.dtype == new.values.dtype == jnp.bfloat16
    written = np.asarray(new.keys[1, :, :2], np.float32)
    assert_allclose(written, tokens(1, 1, 2)[0].swapaxes(0, 1), rtol=2**-8)


def test_a_donated_cache_is_changed_in_place() -> None:
    """Written to and read in one program: no second cache, and no copy on the way."""
    slots, length = 2, 4096
    cache = empty({"attn": (KV_HEADS, HEAD_DIM)}, slots, length, jnp.float32)["attn"]
    total = sum(leaf.nbytes for leaf in cache)

    def step(
        cache: LayerCache, q: Array, k: Array, v: Array, at: Array
    ) -> tuple[LayerCache, Array]:
        cache = write(cache, k, v, at, jnp.int32(0))
        return cache, attend(q, *cache, at[:, None], jnp.int32(0), scale=1.0)

    new = jnp.ones((slots, 1, KV_HEADS, HEAD_DIM))
    arguments = (cache, new, new, new, jnp.array([3, 5], jnp.int32))
    compiled = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == total
    assert memory.temp_size_in_bytes < total / 4

    places = [leaf.unsafe_buffer_pointer() for leaf in cache]
    after, _ = compiled(*arguments)
    assert [leaf.unsafe_buffer_pointer() for leaf in after] == places
    assert all(leaf.is_deleted() for leaf in cache)

"""Huge pages of a KV cache on a CPU."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jinfer.engine.runner import huge_pages
from jinfer.engine.runner.huge_pages import HUGE_PAGE, CacheHugePages, supported
from jinfer.ops.attention.kv_cache import (
    BLOCK,
    CacheShape,
    LayerCache,
    zero_cache,
)

BLOCKS = 300
SHAPES = {"0.attention": CacheShape(heads=2, key_dim=64, value_dim=64)}


def _huge_bytes(array: Array) -> int:
    """Bytes in huge pages of the mappings that begin within an array."""
    begin, total, within = array.unsafe_buffer_pointer(), 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            within = begin <= int(name.partition("-")[0], 16) < begin + array.nbytes
        elif within and name == "AnonHugePages:":
            total += int(rest[0]) << 10
    return total


@pytest.mark.skipif(not supported(), reason="the system has no huge pages")
def test_huge_pages_where_blocks_are_used() -> None:
    pools = jax.tree.map(lambda one: one + 1, zero_cache(SHAPES, BLOCKS, jnp.dtype(jnp.float16)))
    keys = pools["0.attention"].keys
    assert keys.nbytes > 2 * HUGE_PAGE
    pages, before = CacheHugePages(SHAPES), _huge_bytes(keys)
    pages.use(pools, "all", 8)
    assert _huge_bytes(keys) == before
    pages.use(pools, "all", BLOCKS)
    assert _huge_bytes(keys) >= HUGE_PAGE
    assert np.array_equal(np.asarray(keys), np.ones((BLOCKS, 2, BLOCK, 64), np.float16))


@pytest.mark.skipif(not supported(), reason="the system has no huge pages")
def test_int8_keys_have_them_in_long_texts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading digests maps small pages of zeros; a huge page in their place takes memory."""
    int8_keys = jnp.ones((20 * BLOCKS, 2, 4416), jnp.uint8)
    vectors = jnp.ones((20 * BLOCKS, 2, BLOCK, 64), jnp.float16)
    begin, asked = int8_keys.unsafe_buffer_pointer(), list[int]()

    def advise(first: int, length: int) -> None:
        within = min(first + length, begin + int8_keys.nbytes) - max(first, begin)
        asked.append(max(0, within))

    monkeypatch.setattr(huge_pages, "_advise", advise)
    pools = {"0.attention": LayerCache(vectors, vectors, int8_keys)}
    pages = CacheHugePages(SHAPES)
    pages.use(pools, "all", 2 * BLOCKS)
    assert asked == [0, 0]
    pages.use(pools, "all", 2 * BLOCKS, int8_keys=True)
    assert len(asked) == 3
    assert asked[2] >= HUGE_PAGE

"""Huge pages of a KV cache on a CPU."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jinfer.engine.runner.huge_pages import HUGE_PAGE, CacheHugePages, supported
from jinfer.ops.attention.kv_cache import BLOCK, CacheShape, zero_cache

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
    pages = CacheHugePages(SHAPES)
    pages.use(pools, "all", 8)
    assert _huge_bytes(keys) == 0
    pages.use(pools, "all", BLOCKS)
    assert _huge_bytes(keys) >= HUGE_PAGE
    assert np.array_equal(np.asarray(keys), np.ones((BLOCKS, 2, BLOCK, 64), np.float16))

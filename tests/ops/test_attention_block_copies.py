"""Copies of blocks: NumPy's definition, the custom call and the loop of XLA's operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu import build_library
from jinfer.ops.attention.block_copies import copy_blocks, copy_blocks_reference
from tests.arrays import on_device

RNG = np.random.default_rng(3)
TYPES = [np.float32, np.int8, np.float16, np.uint32]


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("function", [copy_blocks, copy_blocks_reference])
def test_copies(function, count: int) -> None:  # type: ignore[no-untyped-def]
    """In their order: a copy of a copy, two to one place, and one of a block to itself."""
    arrays = [RNG.integers(0, 99, (7, 3, n + 1)).astype(t) for n, t in enumerate(TYPES)]
    sources, targets = np.array([[0, 1, 6, 2, 3], [1, 2, 2, 5, 3]], np.int32)
    expected = [array.copy() for array in arrays]
    for source, target in list(zip(sources, targets, strict=True))[:count]:
        for array in expected:
            array[target] = array[source]
    program = jax.jit(function, donate_argnums=0)
    found = program([on_device(a) for a in arrays], sources, targets, np.int32(count))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("sources", "targets", "count", "what"),
    [
        ([0, 4], [1, 2], 2, "no such block"),
        ([0, 1], [1, -1], 2, "no such block"),
        ([0, 1], [1, 2, 3], 2, "do not fit"),
        ([0, 1], [1, 2], 3, "do not fit"),
        ([0, 1], [1, 2], -1, "do not fit"),
    ],
)
def test_refusals(sources: list[int], targets: list[int], count: int, what: str) -> None:
    given = [on_device(each, jnp.int32) for each in (sources, targets, count)]
    with pytest.raises(Exception, match=what):
        jax.block_until_ready(copy_blocks([jnp.ones((4, 2))], *given))

"""Copies of blocks: NumPy's definition, the custom call and the loop of XLA's operations."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu import build_library
from jinfer.ops.attention.kv_blocks import copy_blocks, copy_blocks_reference
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
def test_invalid_copies_are_errors(
    sources: list[int], targets: list[int], count: int, what: str
) -> None:
    given = [on_device(each, jnp.int32) for each in (sources, targets, count)]
    with pytest.raises(Exception, match=what):
        jax.block_until_ready(copy_blocks([jnp.ones((4, 2))], *given))


@pytest.mark.skipif(
    not build_library.available() or not Path("/proc/self/smaps_rollup").exists(),
    reason="no C++ compiler, or no figures from the system",
)
def test_unwritten_memory_stays_uncommitted() -> None:
    """A copy of zeros onto zeros, as of the int8 keys that short texts do not have."""

    def committed() -> int:
        rows = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
        return next(int(row.split()[1]) << 10 for row in rows if row.startswith("Anonymous:"))

    blocks, each = 64, 1 << 20
    empty = build_library.custom_call("jinfer_empty", jax.ShapeDtypeStruct((blocks, each), "uint8"))
    array = jax.block_until_ready(jax.jit(lambda: empty(which=np.int32(0)))())
    program = jax.jit(copy_blocks, donate_argnums=0)
    targets = np.arange(1, blocks, dtype=np.int32)
    sources, count = np.zeros_like(targets), np.int32(blocks - 1)
    program.lower([array], sources, targets, count).compile()
    before = committed()
    (array,) = program([array], sources, targets, count)
    jax.block_until_ready(array)
    assert committed() - before < blocks * each / 4

"""Weight pointers of fused calls: equal bits, and weights live as long as they are needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu import build_library
from jinfer.ops.fusion.fuse_cpu import fuse_operations
from jinfer.ops.fusion.weight_pointers import (
    WeightPointers,
    merge_weight_pointers,
    table,
    use_weight_pointers,
    used_arrays,
    weight_pointers_of,
)
from tests.arrays import on_device
from tests.ops.test_fuse_cpu import CASES, W, Weights

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")

X = on_device(np.random.default_rng(3).standard_normal((1, 5, 64)), jnp.float32)


def first(function: Callable[[jax.Array, Weights], Any]) -> Callable[[Weights, jax.Array], Any]:
    """The function with its weights as its first argument, as a layer has them."""
    return lambda w, x: function(x, w)


@pytest.mark.parametrize("name", CASES)
def test_weights_by_pointer_give_the_bits_of_operands(name: str) -> None:
    run, w = first(CASES[name][0]), jax.device_put(W)
    where = table(jax.tree.leaves(w))
    rows = range(len(where))
    got = jax.jit(lambda w, x, where: fuse_operations(run, WeightPointers(where, rows))(w, x))(
        w, X, where
    )
    expected = jax.jit(fuse_operations(run))(w, X)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_operand_of_a_weight_by_pointer_is_not_read() -> None:
    run, w = first(CASES["one after the other"][0]), jax.device_put(W)
    where = table(jax.tree.leaves(w))
    assert all(used_arrays(lambda w: fuse_operations(run)(w, X), w))
    weights = WeightPointers(where, range(len(where)))
    assert not any(used_arrays(lambda w: fuse_operations(run, weights)(w, X), w))


def test_used_arrays_are_found_in_inner_functions() -> None:
    inside = jax.jit(lambda a, b: (a + 1, b + 2))

    def function(arrays: Any) -> Any:
        a, b = inside(arrays[0], arrays[1])
        c, _ = inside(arrays[2], b)
        return inside(a, arrays[3])[0], c

    assert used_arrays(function, tuple(jnp.ones(3) for _ in range(4))) == [True, False, True, False]


def test_weights_live_as_long_as_programs_with_pointers() -> None:
    weight = jax.device_put(np.ones(300, np.float32))
    before, where = weakref.ref(weight), table([weight])
    places = np.asarray(where).view(np.uint64).tolist()
    assert places == [[weight.unsafe_buffer_pointer(), 1200]]

    @jax.jit
    def long(where: jax.Array, x: jax.Array) -> Any:
        x = jax.lax.fori_loop(0, 500, lambda _, x: x @ x / jnp.max(x), x)
        return where.sum() + 0 * x.sum().astype(jnp.uint32)

    given = jnp.ones((400, 400))
    long.lower(where, given).compile()
    del weight
    gc.collect()
    assert before() is not None
    running = long(where, given)
    del where
    gc.collect()
    if not running.is_ready():  # it is, where others have the machine for themselves
        assert before() is not None
    running.block_until_ready()
    del running
    gc.collect()
    jax.block_until_ready(given + 1)  # JAX lets go of what it held with the next thing that it does
    gc.collect()
    assert before() is None


def test_pointer_tables_are_thread_local() -> None:
    where = table([jnp.ones(3), jnp.ones(4), jnp.ones(5)])
    assert weight_pointers_of("decoder.0") is None
    with use_weight_pointers(where, {"decoder.0": slice(7, 9), "decoder.1": slice(2, 3)}):
        first, second = weight_pointers_of("decoder.0"), weight_pointers_of("decoder.1")
        assert first == (where, range(2))
        assert second == (where, range(2, 3))
        assert first is not None
        assert second is not None
        assert merge_weight_pointers([first, second]) == (where, range(3))
        assert merge_weight_pointers([]) is None
        with pytest.raises(AssertionError):
            merge_weight_pointers([second, first])
        np.testing.assert_array_equal(second.sliced_table(), where[2:])
        assert weight_pointers_of("decoder.2") is None
        with use_weight_pointers(None, {"decoder.0": slice(7, 9)}):
            assert weight_pointers_of("decoder.0") is None
    assert weight_pointers_of("decoder.0") is None

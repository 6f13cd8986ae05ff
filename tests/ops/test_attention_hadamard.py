"""Hadamard transforms of queries and keys: the same bits on every route, and the same scores."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu import build_library, rowwise
from jinfer.ops.attention.hadamard import hadamard, hadamard_reference, transform_sizes
from tests.arrays import on_device
from tests.cpu.helpers import isas

SIZES = [1, 2, 6, 16, 64, 72, 80, 96, 112, 128, 256, 640]


def drawn(size: int, tokens: int = 5, heads: int = 3) -> Any:
    x = np.random.default_rng(size).standard_normal((tokens, heads, size))
    return on_device(x.astype(np.float32))


def test_parts() -> None:
    assert [transform_sizes(size) for size in (80, 96, 1, 640)] == [
        [64, 16],
        [64, 32],
        [1],
        [512, 128],
    ]


@pytest.mark.parametrize("size", SIZES)
def test_rotation_keeps_scores(size: int) -> None:
    q, k = drawn(size), drawn(size, 4)
    a, b = hadamard(q, query=True), hadamard(k, query=False)
    expected = np.einsum("thd,shd->ths", *(np.asarray(x, np.float64) for x in (q, k)))
    got = np.einsum("thd,shd->ths", *(np.asarray(x, np.float64) for x in (a, b)))
    np.testing.assert_allclose(got, expected, atol=2e-6 * size)


@pytest.mark.parametrize("query", [False, True])
def test_bits(query: bool) -> None:
    """Of each set of instructions, and of XLA's operations, for any number of tokens."""
    for size in (6, 64, 80):
        x = drawn(size)
        expected = np.asarray(jax.jit(partial(hadamard_reference, query=query))(x))
        for isa in isas():
            with build_library.lowered_isa(isa):
                turn = jax.jit(partial(hadamard, query=query))
                np.testing.assert_array_equal(np.asarray(turn(x)), expected)
                np.testing.assert_array_equal(np.asarray(turn(x[:1])), expected[:1])


@pytest.mark.parametrize("size", [64, 128])
def test_outliers_are_spread(size: int) -> None:
    """A channel over its head, and so channels that are all alike."""
    one = np.zeros((1, 1, size), np.float32)
    one[..., 5] = 1
    for x in (one, np.ones_like(one)):
        y = np.abs(np.asarray(hadamard(jnp.asarray(x), query=False)))
        assert y.max() <= 1.5 * np.sqrt((y**2).mean())


def test_narrow_types_are_rounded_once() -> None:
    x = drawn(64).astype(jnp.bfloat16)
    got = hadamard(x, query=True)
    assert got.dtype == jnp.bfloat16
    expected = hadamard(x.astype(jnp.float32), query=True).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


@pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")
@pytest.mark.parametrize("size", [0, 48])
def test_mismatched_operands_are_errors(size: int) -> None:
    with pytest.raises(Exception, match="such a size"):
        jax.block_until_ready(rowwise.hadamard(jnp.ones((2, 64)), size=size, query=True))

"""RoPE against NumPy, bit for bit: batch invariance, and every instruction set."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu import build_library, rowwise
from jinfer.ops.rope import rotate, rotate_reference
from tests.arrays import on_device
from tests.cpu.helpers import isas

pytestmark = pytest.mark.usefixtures("optimized")
HEADS, MANY = 3, 90

type Numbers = np.ndarray[Any, np.dtype[np.float32]]


def drawn(size: int, pairs: int) -> tuple[Numbers, Numbers, Numbers]:
    """Heads side by side, cosines and sines, of many tokens."""
    rng = np.random.default_rng(size + pairs)
    x = rng.standard_normal((MANY, HEADS * size)).astype(np.float32)
    angles = rng.uniform(0, 300, (MANY, pairs)).astype(np.float32)
    return x, np.cos(angles), np.sin(angles)


def wanted(x: Numbers, cos: Numbers, sin: Numbers, size: int, adjacent: bool) -> Numbers:
    """As the paper has it; NumPy rounds each product."""
    heads, dim = x.reshape(len(x), -1, size).copy(), 2 * cos.shape[1]
    at = (
        (slice(0, dim, 2), slice(1, dim, 2))
        if adjacent
        else (slice(dim // 2), slice(dim // 2, dim))
    )
    a, b = (heads[..., each].copy() for each in at)
    c, s = cos[:, None], sin[:, None]
    heads[..., at[0]], heads[..., at[1]] = a * c - b * s, b * c + a * s
    return heads.reshape(x.shape)


@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize(("size", "pairs"), [(64, 32), (16, 8), (10, 5), (80, 10), (128, 50)])
def test_bits(size: int, pairs: int, adjacent: bool) -> None:
    x, cos, sin = drawn(size, pairs)
    expected = wanted(x, cos, sin, size, adjacent)
    way = jax.jit(partial(rotate_reference, size=size, adjacent=adjacent))
    for isa in isas():
        with build_library.lowered_isa(isa):
            turn = jax.jit(partial(rotate, size=size, adjacent=adjacent))
            for count in (1, 3, 8, MANY):
                got = turn(x[:count], cos[:count], sin[:count])
                np.testing.assert_array_equal(np.asarray(got), expected[:count])
    for count in (1, 2, 3, 7, 8, 33, MANY):
        got = way(x[:count], cos[:count], sin[:count])
        np.testing.assert_array_equal(np.asarray(got), expected[:count])


def test_other_types_and_axes() -> None:
    """Computed in float32, and rounded once."""
    x, cos, sin = drawn(16, 6)
    expected = wanted(x, cos, sin, 16, False)
    split = [part.reshape(2, MANY // 2, -1) for part in (x, cos, sin)]
    got = rotate(*map(on_device, split), size=16, adjacent=False)
    np.testing.assert_array_equal(np.asarray(got).reshape(x.shape), expected)
    narrow = on_device(x, jnp.bfloat16)
    got = rotate(narrow, on_device(cos), on_device(sin), size=16, adjacent=False)
    again = wanted(np.asarray(narrow, np.float32), cos, sin, 16, False)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got), np.asarray(on_device(again, jnp.bfloat16)))


@pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("what", "size", "cos", "sin"),
    [
        ("such a size", 5, 2, 2),
        ("such a size", 0, 2, 2),
        ("such a size", 4, 3, 3),
        ("do not fit x", 4, 2, 1),
    ],
)
def test_mismatched_operands_are_errors(what: str, size: int, cos: int, sin: int) -> None:
    x = jnp.ones((2, 8))
    with pytest.raises(Exception, match=what):
        jax.block_until_ready(
            rowwise.rotate(x, jnp.ones((2, cos)), jnp.ones((2, sin)), size=size, adjacent=False)
        )

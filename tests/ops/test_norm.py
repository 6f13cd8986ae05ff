"""The custom calls of rows give what their definitions give, and each row by itself."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfer.cpu import build_library
from jinfer.cpu import rowwise as cpu
from jinfer.ops.activation import activate
from jinfer.ops.backend import target_platform
from jinfer.ops.norm import normalize, softmax
from tests.arrays import on_device
from tests.cpu.helpers import isas

calls = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler here")

sigmoid = partial(activate, "sigmoid")


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@calls
@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 600),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([1, 3]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
)
def test_norms_against_float64(
    rows: int, size: int, offset: float, groups: int, centered: bool, biased: bool, seed: int
) -> None:
    x = random(rows, groups, size, seed=seed) * 3 + 1
    weight, bias = random(groups, size, seed=seed + 1), random(groups, size, seed=seed + 2)
    wide = x.astype(np.float64)
    if centered:
        wide = wide - wide.mean(-1, keepdims=True)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * (weight + offset)
    expected += bias if biased else 0
    given = on_device(x), on_device(weight), on_device(bias) if biased else None

    def check(function: Any) -> None:
        compiled = jax.jit(partial(function, eps=1e-5, centered=centered, offset=offset))
        got = np.asarray(compiled(*given))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)

    with target_platform("tpu"):
        check(normalize)
    for isa in isas():
        with build_library.lowered_isa(isa):
            check(normalize)


@pytest.mark.parametrize("size", [1, 7, 64, 100])
def test_shares(size: int) -> None:
    x = random(9, size) * 20
    x[3, : size // 2] = -np.inf
    wide = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    for isa in isas() or ["portable"]:
        with build_library.lowered_isa(isa) if isas() else jax.named_scope(isa):
            shares, each = np.asarray(softmax(on_device(x))), np.asarray(sigmoid(on_device(x)))
        np.testing.assert_allclose(
            shares, wide / wide.sum(-1, keepdims=True), rtol=2e-5, atol=1e-30
        )
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(each, 1 / (1 + np.exp(-x.astype(np.float64))), 1e-5, 1e-37)


def test_nan_is_seen() -> None:
    x = random(3, 40)
    x[1, 33] = np.nan
    for function in (softmax, sigmoid, lambda v: normalize(v, None, eps=1e-5)):
        got = np.isnan(np.asarray(function(on_device(x))))
        assert got[1, 33]
        assert not got[[0, 2]].any()
    assert np.isnan(np.asarray(softmax(on_device(x)))[1]).all()


@calls
@pytest.mark.parametrize("size", [1, 7, 64, 100, 576])
def test_rows_are_batch_invariant(size: int) -> None:
    """XLA's own sums over the last axis are not, from some thousand numbers on."""
    x = random(600, size)
    functions = [jax.jit(softmax), jax.jit(sigmoid), jax.jit(partial(activate, "gelu"))] + [
        jax.jit(lambda v, c=centered: normalize(v, None, eps=1e-5, centered=c))
        for centered in (False, True)
    ]
    for isa in isas():
        with build_library.lowered_isa(isa):
            for function in functions:
                alone = np.concatenate([function(row[None]) for row in x[:70]])
                for rows in (2, 3, 64, 70, 257, 600):
                    got = np.asarray(function(x[:rows]))[:70]
                    np.testing.assert_array_equal(got.view(np.uint32), alone[:rows].view(np.uint32))


def test_leading_axes_and_types_stay() -> None:
    x = jnp.ones((2, 3, 40), jnp.bfloat16)
    y = normalize(x, jnp.full(40, 2.0), eps=1e-6)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    np.testing.assert_allclose(y.astype(jnp.float32), 2.0)


def test_empty_input() -> None:
    assert normalize(jnp.ones((0, 8)), jnp.ones(8), eps=1e-6).shape == (0, 8)


@calls
@pytest.mark.parametrize(
    ("weight", "bias", "what"),
    [((1, 7), None, "do not fit"), ((1, 8), (2, 8), "do not fit"), ((0, 8), None, "no weights")],
)
def test_mismatched_vectors_are_errors(
    weight: tuple[int, ...], bias: tuple[int, ...] | None, what: str
) -> None:
    vectors = jnp.ones(weight), None if bias is None else jnp.ones(bias)
    with pytest.raises(Exception, match=what):
        jax.block_until_ready(
            cpu.norm(jnp.ones((2, 8)), *vectors, centered=False, eps=1e-5, offset=0.0)
        )


@calls
@pytest.mark.parametrize("name", ["softplus", "exp", "expm1", "log1p", "tanh"])
def test_functions(name: str) -> None:
    """To their last digits, also where they are almost 0 or x."""
    small = np.geomspace(1e-30, 1, 301)
    x = np.concatenate([np.linspace(-80, 80, 4001), small, -small, [-np.inf, np.inf, 0]])
    x = np.abs(x) if name == "log1p" else x
    x = x.astype(np.float32)
    wide = x.astype(np.float64)
    expected = np.logaddexp(wide, 0) if name == "softplus" else getattr(np, name)(wide)
    for isa in isas():
        with build_library.lowered_isa(isa):
            got = np.asarray(activate(name, on_device(x[None])))[0]
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        assert np.isnan(activate(name, on_device(np.full((1, 3), np.nan, np.float32)))).all()

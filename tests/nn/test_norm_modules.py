"""Norms against NumPy."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike
from numpy.testing import assert_allclose

from jinfer.modelspec import blocks
from jinfer.nn.norm_modules import LayerNorm, RMSNorm
from tests.arrays import on_device
from tests.reference.numpy_blocks import Floats, layer_norm, rms_norm

SIZE = 24
RNG = np.random.default_rng(0)
X = RNG.normal(3.0, 2.0, (2, 5, SIZE))
WEIGHT, BIAS = RNG.normal(size=(2, SIZE))
TYPES = pytest.mark.parametrize(
    ("dtype", "rtol", "atol"), [(jnp.float32, 1e-5, 1e-5), (jnp.bfloat16, 2**-8, 1e-6)]
)


def rounded(x: Floats, dtype: DTypeLike) -> Floats:
    return np.asarray(on_device(x, dtype), np.float64)


def output(module: Any, dtype: DTypeLike) -> Floats:
    got = module(on_device(X, dtype))
    assert got.dtype == dtype
    return np.asarray(got, np.float64)


@TYPES
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms(dtype: DTypeLike, rtol: float, atol: float, plus_one: bool, eps: float) -> None:
    """Computed in float32 and rounded once, also for a bfloat16 input."""
    module = RMSNorm(blocks.RMSNormSpec(kind="rms", size=SIZE, eps=eps, plus_one=plus_one), dtype)
    module.weight.set_value(on_device(WEIGHT, jnp.float32))
    wanted = rms_norm(rounded(X, dtype), WEIGHT + plus_one, eps)
    assert_allclose(output(module, dtype), wanted, rtol=rtol, atol=atol)


@TYPES
@pytest.mark.parametrize(
    ("weight", "bias", "plus_one"),
    [(True, True, False), (True, True, True), (True, False, False), (False, False, False)],
)
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_layer(
    dtype: DTypeLike,
    rtol: float,
    atol: float,
    weight: bool,
    bias: bool,
    plus_one: bool,
    eps: float,
) -> None:
    block = blocks.LayerNormSpec(
        kind="layer", size=SIZE, eps=eps, weight=weight, bias=bias, plus_one=plus_one
    )
    module = LayerNorm(block, dtype)
    assert (hasattr(module, "weight"), hasattr(module, "bias")) == (weight, bias)
    if weight:
        module.weight.set_value(on_device(WEIGHT, jnp.float32))
    if bias:
        module.bias.set_value(on_device(BIAS, jnp.float32))
    wanted = layer_norm(
        rounded(X, dtype), WEIGHT + plus_one if weight else 1.0, BIAS if bias else 0.0, eps
    )
    assert_allclose(output(module, dtype), wanted, rtol=rtol, atol=atol)


def test_layer_norm_of_a_large_mean() -> None:
    """The mean is taken away before squaring; the mean of squares minus its square would be 0."""
    x = 1e4 + np.arange(SIZE, dtype=np.float32)[None, None]
    block = blocks.LayerNormSpec(kind="layer", size=SIZE, weight=False, bias=False)
    got = LayerNorm(block, jnp.float32)(on_device(x))
    assert_allclose(got, layer_norm(x.astype(np.float64)), atol=1e-3)

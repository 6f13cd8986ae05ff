"""Activation functions and feed-forward blocks against NumPy."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from jinfer.cpu import build_library
from jinfer.modelspec import feed_forward_blocks
from jinfer.nn.feed_forward import MLP, Activation, GatedMLP, Gating
from jinfer.nn.projections import Linear
from jinfer.ops.activation import activate
from tests.arrays import on_device
from tests.cpu.helpers import isas
from tests.reference import numpy_blocks
from tests.reference.numpy_blocks import Floats

DEFINITIONS: dict[str, Callable[[Floats], Floats]] = {
    "silu": numpy_blocks.silu,
    "gelu": numpy_blocks.gelu_erf,
    "gelu_tanh": numpy_blocks.gelu_tanh,
    "quick_gelu": numpy_blocks.gelu_quick,
    "relu": numpy_blocks.relu,
    "relu2": numpy_blocks.relu_squared,
    "sigmoid": numpy_blocks.sigmoid,
    "tanh": numpy_blocks.tanh,
    "softplus": numpy_blocks.softplus,
}
VALUES = np.concatenate([np.linspace(-12, 12, 97), [-1e4, -100.0, 0.0, 100.0]])


def test_every_activation_has_a_definition() -> None:
    assert set(DEFINITIONS) == set(get_args(feed_forward_blocks.Activation))


@pytest.mark.parametrize("name", DEFINITIONS)
def test_activation(name: str) -> None:
    x = on_device(VALUES, jnp.float32)
    wanted = DEFINITIONS[name](np.asarray(x, np.float64))
    for isa in isas() or ["portable"]:
        with build_library.lowered_isa(isa) if isas() else nullcontext():
            got = np.asarray(activate(name, x))
        assert_allclose(got, wanted, rtol=1e-5, atol=2e-6)
        assert_allclose(got[np.abs(VALUES) < 4], wanted[np.abs(VALUES) < 4], rtol=2e-5, atol=2e-8)
    block = feed_forward_blocks.ActivationSpec(kind="activation", function=name)  # type: ignore[arg-type]
    assert np.array_equal(Activation(block, jnp.float32)(x), activate(name, x))


@pytest.mark.parametrize("name", DEFINITIONS)
def test_nan_stays_in_its_own_row(name: str) -> None:
    x = np.linspace(-3, 3, 101, dtype=np.float32)
    x[[0, 40, 100]] = np.nan
    for isa in isas() or ["portable"]:
        with build_library.lowered_isa(isa) if isas() else nullcontext():
            got = np.asarray(activate(name, on_device(x)))
        assert np.array_equal(np.isnan(got), np.isnan(x))


@pytest.mark.parametrize("name", DEFINITIONS)
def test_activation_of_bfloat16_is_computed_in_float32(name: str) -> None:
    x = on_device(VALUES, jnp.bfloat16)
    got = activate(name, x)
    assert got.dtype == jnp.bfloat16
    wanted = DEFINITIONS[name](np.asarray(x, np.float64))
    assert_allclose(np.asarray(got, np.float64), wanted, rtol=2**-8, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *((name, {}) for name in [*DEFINITIONS, "clamped_swiglu"]),
        ("clamped_swiglu", {"limit": 1.5}),
        ("clamped_swiglu", {"alpha": 0.9, "limit": 3.0}),
        ("clamped_silu", {"limit": 1.5}),
    ],
)
def test_gated(name: Any, keys: dict[str, Any]) -> None:
    """Over a grid of both inputs, far beyond where the clamped one cuts."""
    gate, up = (side.ravel() for side in np.meshgrid(VALUES, VALUES[::4]))
    block = feed_forward_blocks.GatedMLPSpec(
        kind="gated", inputs=1, width=1, activation=name, **keys
    )
    assert block.check() is None
    got = Gating.of(block)(on_device(gate, jnp.float32), on_device(up, jnp.float32))
    gate, up = (np.asarray(np.float32(x), np.float64) for x in (gate, up))
    if name == "clamped_swiglu":
        wanted = numpy_blocks.swiglu_clamped(gate, up, **keys)
    elif name == "clamped_silu":
        limit = keys["limit"]
        wanted = np.minimum(DEFINITIONS["silu"](gate), limit) * np.clip(up, -limit, limit)
    else:
        wanted = DEFINITIONS[name](gate) * up
    assert_allclose(got, wanted, rtol=2e-5, atol=1e-4)


def fill(linear: Linear, rng: np.random.Generator) -> Callable[[Floats], Floats]:
    """Random numbers for a projection, and what it then computes."""
    weight = rng.normal(size=linear.weight.shape).astype(np.float32)
    linear.weight.set_value(on_device(weight))
    if linear.bias is None:
        return lambda x: numpy_blocks.linear(x, weight)
    bias = rng.normal(size=linear.bias.shape).astype(np.float32)
    linear.bias.set_value(on_device(bias))
    return lambda x: numpy_blocks.linear(x, weight, bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["mlp", "gated"])
def test_block(kind: Any, bias: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 6)).astype(np.float32)
    wide = x.astype(np.float64)
    sizes: Any = {"inputs": 6, "width": 10, "bias": bias}
    module: MLP | GatedMLP
    if kind == "mlp":
        module = MLP(
            feed_forward_blocks.MLPSpec(kind="mlp", activation="relu2", **sizes), jnp.float32
        )
        up, down = fill(module.up, rng), fill(module.down, rng)
        wanted = down(numpy_blocks.relu_squared(up(wide)))
    else:
        module = GatedMLP(feed_forward_blocks.GatedMLPSpec(kind="gated", **sizes), jnp.float32)
        gate, up, down = fill(module.gate, rng), fill(module.up, rng), fill(module.down, rng)
        wanted = down(numpy_blocks.silu(gate(wide)) * up(wide))
    assert_allclose(module(on_device(x)), wanted, rtol=1e-5, atol=1e-4)

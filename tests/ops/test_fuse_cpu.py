"""Row operations are put together wherever they stand, and nothing else is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu import build_library
from jinfer.ops.activation import activate
from jinfer.ops.attention.hadamard import hadamard
from jinfer.ops.fusion.fuse_cpu import fuse_operations, fuses_for_cpu
from jinfer.ops.matmul.lora import RowAdapters, Stacks, add_lora
from jinfer.ops.matmul.matmul import gated_linear, linear, linears
from jinfer.ops.norm import normalize
from jinfer.ops.rope import rotate
from jinfer.quant import QuantizedTensor
from jinfer.quant.calibration_stats import record_inputs
from jinfer.quant_format import QuantFormat
from tests.arrays import on_device
from tests.cpu.test_quantized_matmul import matrix

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")

SIZE, WIDTH = 64, 192
FORMAT = QuantFormat("4", symmetric=True)


def weight(outputs: int, inputs: int, seed: int) -> QuantizedTensor:
    return matrix(FORMAT, outputs, inputs, seed=seed)


W = {
    "q": weight(SIZE, SIZE, 0),
    "o": weight(SIZE, SIZE, 1),
    "gate": weight(WIDTH, SIZE, 2),
    "up": weight(WIDTH, SIZE, 3),
    "down": weight(SIZE, WIDTH, 4),
}
BIAS = np.linspace(-1, 1, SIZE, dtype=np.float32)
SCALE = np.linspace(0.5, 2, SIZE, dtype=np.float32)


type Weights = Mapping[str, Any]


def mixed(x: jax.Array) -> jax.Array:
    """Something that needs all rows, as an attention does."""
    return jnp.cumsum(x, axis=1)


def norm(x: jax.Array) -> jax.Array:
    return normalize(x, on_device(SCALE), eps=1e-5)


def feed_forward(x: jax.Array, w: Weights) -> jax.Array:
    y = gated_linear(x, w["gate"], w["up"], "silu")
    assert y is not None
    return linear(y, w["down"])


def one_after_the_other(x: jax.Array, w: Weights) -> jax.Array:
    x = x + linear(mixed(linear(norm(x), w["q"])), w["o"])
    return x + feed_forward(norm(x), w)


def side_by_side(x: jax.Array, w: Weights) -> jax.Array:
    y = norm(x)
    return x + linear(mixed(linear(y, w["q"])), w["o"]) + feed_forward(y, w)


def with_biases(x: jax.Array, w: Weights) -> jax.Array:
    x = x + linear(mixed(linear(norm(x), w["q"], on_device(BIAS))), w["o"], on_device(BIAS))
    return x + 0.22 * linear(jnp.sin(linear(norm(x), w["q"])), w["o"], on_device(BIAS))


def without_a_gate(x: jax.Array, w: Weights) -> jax.Array:
    for name in ("gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "silu"):
        x = x + linear(activate(name, linear(norm(x), w["up"])), w["down"], on_device(BIAS))
    return x


def a_gate_of_its_own(x: jax.Array, w: Weights) -> jax.Array:
    """That the product cannot apply."""
    gate, up = linears(norm(x), [w["gate"], w["up"]], [None, None])
    return x + linear(activate("gelu", gate) * up, w["down"])


def a_row_of_its_own(x: jax.Array, w: Weights) -> jax.Array:
    """With one row, what a call gives looks like a vector that is added to all rows."""
    y = linear(norm(x), w["q"])
    return linear((y[0] + x[0])[None] + x, w["o"])


def norms_after(x: jax.Array, w: Weights) -> jax.Array:
    x = norm(x + linear(mixed(linear(x, w["q"])), w["o"]) * 2.0)
    return norm(x + feed_forward(x, w))


def heads(x: jax.Array, w: Weights) -> jax.Array:
    """Several norms of a row."""
    q, k = linears(norm(x), [w["q"], w["o"]], [None, None])
    q = normalize(q.reshape(*q.shape[:2], 4, 16), on_device(SCALE[:16]), eps=1e-5)
    return x + linear(q.reshape(x.shape) * k, w["o"])


COS, SIN = (of(np.linspace(0, 9, 40 * 8)).reshape(1, 40, 8) for of in (np.cos, np.sin))


def rotations(x: jax.Array, w: Weights) -> jax.Array:
    """They are of the same rows as the products that they follow."""
    cos, sin = (on_device(part[:, : x.shape[1]], jnp.float32) for part in (COS, SIN))
    q, k = linears(norm(x), [w["q"], w["o"]], [on_device(BIAS), None])
    q, k = (
        rotate(part, cos, sin, size=32, adjacent=adjacent)
        for part, adjacent in ((q, False), (k, True))
    )
    return x + linear(mixed(q * k), w["o"])


def transforms(x: jax.Array, w: Weights) -> jax.Array:
    """Hadamard transforms stay in the call that gives the heads."""
    q, k = linears(norm(x), [w["q"], w["o"]], [None, None])
    q, k = (
        hadamard(part[0].reshape(part.shape[1], -1, 32), query=query).reshape(part.shape)
        for part, query in ((q, True), (k, False))
    )
    return x + linear(mixed(q * k), w["o"])


A, B = (
    on_device(np.random.default_rng(seed).standard_normal((2, 4, SIZE)), jnp.float16)
    for seed in (5, 6)
)
CODES = Stacks(
    on_device(np.random.default_rng(8).integers(-127, 128, (2, 4, SIZE)), jnp.int8),
    on_device(np.random.default_rng(9).integers(-127, 128, (2, 4, SIZE)), jnp.int8),
    on_device(np.random.default_rng(7).uniform(0.01, 0.03, (2, 2, 4)), jnp.float32),
)


def adapters(x: jax.Array, w: Weights) -> jax.Array:
    """Terms are added to two products, of which one is read again as it was."""
    slots = np.arange(x.shape[1], dtype=np.int32) % 3
    order = np.argsort(np.where(slots, slots, 3), kind="stable").astype(np.int32)
    given = slots, np.linspace(1, 2, len(slots), dtype=np.float32), order, np.argsort(order)
    at = RowAdapters(*map(on_device, given))
    normed = norm(x)
    q, k = linears(normed, [w["q"], w["o"]], [None, None])
    first, second = add_lora([q, k], normed, [Stacks(A, B), CODES], at)
    return x + linear(first * second + q, w["o"])


# What is left of calls, by name; "": those of a product by itself.
CASES: dict[str, tuple[Callable[[Any, Weights], Any], dict[str, int]]] = {
    "one after the other": (one_after_the_other, {"jinfer_fused_layers": 2}),
    "side by side": (side_by_side, {"jinfer_fused_layers": 2}),
    "biases and factors": (with_biases, {"jinfer_fused_layers": 3}),
    "norms after": (norms_after, {"": 1, "jinfer_fused_layers": 1}),
    "rotations": (rotations, {"jinfer_fused_layers": 2}),
    "transforms": (transforms, {"jinfer_fused_layers": 2}),
    "heads": (heads, {"jinfer_fused_layers": 1}),
    "a row of its own": (a_row_of_its_own, {"jinfer_fused_layers": 1}),
    "without a gate": (without_a_gate, {"jinfer_fused_layers": 1}),
    "adapters": (adapters, {"jinfer_fused_layers": 1}),
    "a gate of its own": (a_gate_of_its_own, {"jinfer_fused_layers": 1}),
}


def calls(function: Callable[[Any], Any], x: Any) -> Counter[str]:
    eqns = jax.make_jaxpr(function)(x).jaxpr.eqns
    return Counter(e.params["target_name"] for e in eqns if e.primitive.name == "ffi_call")


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_calls_and_bits(name: str, dtype: Any) -> None:
    """With matrices in codes (None) and in plain numbers."""
    case, counts = CASES[name]
    weights = W if dtype is None else {k: on_device(v.dequantize(), dtype) for k, v in W.items()}
    alone = "jinfer_linear" if dtype is None else "jinfer_dense"
    left = {call or alone: count for call, count in counts.items()}

    def function(x: Any) -> Any:
        return case(x, weights)

    for tokens in (1, 5, 40):
        x = np.random.default_rng(tokens).standard_normal((1, tokens, SIZE)).astype(np.float32)
        assert calls(fuse_operations(function), x) == left
        got, expected = jax.jit(fuse_operations(function))(x), jax.jit(function)(x)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def test_calibration_disables_fusion() -> None:
    assert fuses_for_cpu({"w": W["q"]})
    assert not fuses_for_cpu({"w": record_inputs(W["q"], "squares")})


def test_unfusible_operations_are_unchanged() -> None:
    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sin(x) + x, norm(x)

    x = jnp.ones((1, 3, SIZE), jnp.float32)
    assert calls(fuse_operations(function), x) == {"jinfer_norm": 1}
    np.testing.assert_array_equal(fuse_operations(function)(x)[0], function(x)[0])


def test_other_arguments_and_results() -> None:
    """Trees of them, of any types; inner functions are called as they were."""

    @jax.jit
    def inner(x: jax.Array, n: jax.Array) -> jax.Array:
        return x * n

    def function(x: dict[str, Any], n: jax.Array) -> dict[str, Any]:
        y = linear(norm(x["a"]), W["q"])
        return {"y": inner(y, n.astype(jnp.float32)), "n": n + 1, "same": x["a"]}

    x, n = {"a": np.ones((1, 2, SIZE), np.float32)}, jnp.int32(3)
    got, expected = fuse_operations(function)(x, n), function(x, n)
    assert got.keys() == expected.keys()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.usefixtures("optimized")
def test_single_products_are_not_fused() -> None:
    """A row's bits are those it has alone, though XLA's loops have other vectors for more rows."""
    a, b = (
        on_device(np.random.default_rng(n).normal(size=(1, 4)).astype(np.float32)) for n in (1, 2)
    )
    x = np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32)

    def function(x: jax.Array) -> jax.Array:
        return (
            x * a
            + x * b
            + jnp.exp(x) * a
            + jnp.logaddexp(x, 0.0)
            + jnp.tanh(x) / jnp.sqrt(jnp.abs(x))
        )

    run = jax.jit(fuse_operations(function))
    alone = np.concatenate([run(row[None]) for row in x])
    for rows in (2, 3, 8, 96):
        np.testing.assert_array_equal(run(x[:rows]), alone[:rows])
    plain = jax.jit(function)
    assert any(np.any(plain(x[:rows]) != alone[:rows]) for rows in (8, 96))

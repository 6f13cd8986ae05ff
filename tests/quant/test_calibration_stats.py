"""Recording what weights are multiplied with, in a whole model."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.nn.forward_context import ForwardBatch
from jinfer.ops.matmul import matmul as ops
from jinfer.quant import calibration_stats
from jinfer.quant.calibration_stats import Kind, RecordedWeight, record_inputs
from tests.arrays import on_device
from tests.loader.weights.loading import model, parameters

TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]], np.int32)


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Products record what they multiply; what that is, is collected here as well."""
    plain, plain_one = ops.linears, ops.linear
    seen: list[Any] = []

    def record(x: Any, weights: Sequence[Any]) -> list[Any]:
        seen.extend([x] * len(weights))
        return calibration_stats.record(x, weights)

    def linears(x: Any, weights: Sequence[Any], biases: Sequence[Any]) -> Any:
        return plain(x, record(x, weights), biases)

    def linear(x: Any, weight: Any, *rest: Any) -> Any:
        return plain_one(x, record(x, [weight])[0], *rest)

    monkeypatch.setattr("jinfer.nn.projections.linears", linears)
    monkeypatch.setattr("jinfer.nn.projections.linear", linear)
    return seen


def test_every_product_of_a_model(inputs: list[Any]) -> None:
    abstract, _ = model()
    plain = tuple(parameters(abstract)[name] for name in abstract.names)
    taps = {
        name: record_inputs(leaf, "products" if ".q." in name or ".o." in name else "squares")
        for name, leaf, role in zip(abstract.names, plain, abstract.roles, strict=True)
        if role == "matrix"
    }
    tapped = tuple(taps.get(name, leaf) for name, leaf in zip(abstract.names, plain, strict=True))

    def run(leaves: tuple[Any, ...], tokens: Any) -> Any:
        module = abstract.module(leaves)
        step = ForwardBatch.of_texts(tokens, on_device([tokens.shape[1]], jnp.int32))
        stack = module.stacks["decoder"]
        x = stack.embed(tokens, jnp.zeros_like(tokens), step, module.shared)
        return stack.run_layers(x, tokens, step, {}, module.shared)[0].x

    program = jax.jit(run)
    for tokens in TOKENS:
        expected = program(plain, tokens[None])
        np.testing.assert_array_equal(program(tapped, tokens[None]), expected)

    inputs.clear()
    with jax.disable_jit():
        for tokens in TOKENS:
            run(plain, tokens[None])
    order = [f"decoder.{i}.attn.{part}.weight" for i in range(2) for part in "qkvo"]
    assert sorted(taps) == sorted(order)
    assert len(inputs) == 2 * len(order)
    for at, name in enumerate(order):
        x = np.concatenate([inputs[at][0], inputs[at + len(order)][0]])
        found = taps[name].inputs()
        products = x.T @ x / 16
        reference = products if found.mean.ndim == 2 else np.diag(products)
        np.testing.assert_allclose(found.mean, reference, rtol=0, atol=1e-5 * products.max())
        np.testing.assert_allclose(found.importance, np.diag(products), rtol=1e-3)
        assert found.rows == 16


@pytest.mark.parametrize("kind", ["squares", "products"])
def test_one_matrix_of_a_stack_and_masked_rows(kind: Kind) -> None:
    x = np.random.default_rng(0).normal(size=(2, 4, 6)).astype(np.float32)
    where = np.arange(8).reshape(2, 4) % 3 > 0
    tapped = record_inputs(np.zeros((3, 5, 6), np.float32), kind)

    @jax.jit
    def run(tapped: RecordedWeight, x: Any, experts: Any) -> Any:
        def one(expert: Any, total: Any) -> Any:
            (weight,) = calibration_stats.record(x, [tapped], expert, where)
            return total + weight.sum()

        return jax.lax.fori_loop(1, experts, one, jnp.float32(0))  # as experts are gone through

    run(tapped, x, jnp.int32(3))
    rows = x[where]
    found = tapped.inputs()
    np.testing.assert_array_equal(found.rows, [0, len(rows), len(rows)])
    products = np.stack([np.zeros((6, 6)), *[rows.T @ rows / len(rows)] * 2])
    squares = np.diagonal(products, axis1=1, axis2=2)
    reference = products if kind == "products" else squares
    np.testing.assert_allclose(found.mean, reference, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.importance, squares, rtol=1e-4)
    assert tapped.shape == (3, 5, 6)
    with pytest.raises(IndexError, match="`record` takes the index"):
        tapped[1]

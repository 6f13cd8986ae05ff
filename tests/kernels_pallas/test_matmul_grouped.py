"""Products of a mixture of experts against NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfer.quant_format import FLOAT_DTYPES, QuantFormat
from kernels_pallas.matmul.grouped import (
    expert_tiles,
    grouped_dense_matmul,
    grouped_quantized_matmul,
    takes,
)
from tests.arrays import on_device
from tests.kernels_pallas.helpers import assert_near, random_matrix, random_rows

run = functools.partial(jax.jit, static_argnames=("backend", "gated", "interpret"))(
    grouped_quantized_matmul
)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 9), min_size=5, max_size=5), st.sampled_from([1, 2, 4]))
def test_every_row_is_in_one_tile(sizes: list[int], size: int) -> None:
    offsets = np.cumsum([0, *sizes])
    expert, first, present = np.asarray(
        jax.jit(expert_tiles, static_argnums=(1, 2))(on_device(offsets, jnp.int32), 45, size)
    )
    covered = np.full(45, -1)
    for e, begin, count in zip(expert, first, present, strict=True):
        assert count <= size
        assert (covered[begin : begin + count] == -1).all()
        covered[begin : begin + count] = e
    np.testing.assert_array_equal(covered[: offsets[-1]], np.repeat(np.arange(5), sizes))
    assert (covered[offsets[-1] :] == -1).all()


@pytest.mark.parametrize("backend", ["triton", "xla"])
@pytest.mark.parametrize("sizes", [(2, 1, 0, 4, 1), (0, 0, 40, 0, 3)])
def test_each_row_with_its_expert(sizes: tuple[int, ...], backend: str) -> None:
    """40 rows of an expert are more than a tile of them."""
    matrix, values = random_matrix(QuantFormat("4"), (2, 5, 40, 600))
    x = random_rows(sum(sizes), 600)
    (y,) = run(
        on_device(x),
        offsets_of(sizes),
        [matrix],
        index=on_device([1], jnp.int32),
        backend=backend,
        interpret=True,
    )
    for row, expert in enumerate(np.repeat(np.arange(5), sizes)):
        assert_near(y[row : row + 1], x[row : row + 1], values[1, expert])


@pytest.mark.parametrize("inputs", [300, 1500])  # in the kernel; beside it, where inputs are split
def test_gate_and_up_of_experts(inputs: int) -> None:
    gate, g = random_matrix(QuantFormat("4"), (3, 20, inputs), 1)
    up, u = random_matrix(QuantFormat("4"), (3, 20, inputs), 2)
    x = random_rows(4, inputs) / 1e4
    (y,) = run(on_device(x), offsets_of((1, 1, 2)), [gate, up], gated=True, interpret=True)
    for row, expert in enumerate([0, 1, 2, 2]):
        a, b = x[row] @ g[expert].T, x[row] @ u[expert].T
        np.testing.assert_allclose(
            np.asarray(y[row]), a / (1 + np.exp(-a)) * b, rtol=5e-3, atol=5e-3
        )


def test_wrong_inputs_are_refused() -> None:
    matrix, _ = random_matrix(QuantFormat("4"), (2, 16, 64))
    with pytest.raises(ValueError, match="x has 65 inputs, the experts 64"):
        grouped_quantized_matmul(jnp.zeros((3, 65)), offsets_of((1, 2)), [matrix])


def offsets_of(sizes: tuple[int, ...]) -> jax.Array:
    return on_device(np.cumsum([0, *sizes]), jnp.int32)


@pytest.mark.parametrize(
    ("x_type", "kind", "transposed"),
    [("f32", "bf16", False), ("bf16", "bf16", False), ("f16", "f16", True)],
)
@pytest.mark.parametrize("sizes", [(2, 1, 0, 4, 1), (0, 0, 70, 0, 3)])
def test_plain_matrices_of_experts(
    sizes: tuple[int, ...], x_type: str, kind: str, transposed: bool
) -> None:
    rng = np.random.default_rng(3)
    x = on_device(rng.standard_normal((sum(sizes), 192)), FLOAT_DTYPES[x_type])
    matrices = on_device(rng.standard_normal((5, 40, 192)), FLOAT_DTYPES[kind])
    stored = matrices.swapaxes(1, 2) if transposed else matrices
    assert takes(stored, transposed=transposed)
    y = jax.jit(functools.partial(grouped_dense_matmul, transposed=transposed, interpret=True))(
        x, offsets_of(sizes), stored
    )
    expert = np.repeat(np.arange(5), sizes)
    expected = np.einsum(
        "ri,roi->ro", np.asarray(x, np.float64), np.asarray(matrices, np.float64)[expert]
    )
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-5, atol=1e-4)

"""Dense projections against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.typing import DTypeLike
from numpy.testing import assert_allclose

from jinfer.ops.matmul import dense
from jinfer.ops.matmul.matmul import gated_linear, linear, linear_of_stack, linears, take_rows
from tests.arrays import on_device
from tests.reference.numpy_blocks import linear as numpy_linear

INPUTS, OUTPUTS = 300, 7
NARROW = [jnp.bfloat16, jnp.float16]


@pytest.fixture(params=["call", "xla"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the custom call, where there is one, and without."""
    if request.param == "xla":
        monkeypatch.setattr(dense, "reads_16_bit_weights", lambda: False)
    elif not dense.reads_16_bit_weights():
        pytest.skip("no custom calls")


both_ways = pytest.mark.usefixtures("_way")


def random(seed: int, *shape: int, dtype: DTypeLike = jnp.float32) -> Array:
    return on_device(np.random.default_rng(seed).normal(size=shape), dtype)


def product(x: Array, weight: Array) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).swapaxes(-1, -2)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-8), (jnp.float16, 2**-11)]
)
@pytest.mark.parametrize("rows", [(), (1,), (2, 3)])
@pytest.mark.parametrize("biased", [False, True])
@both_ways
def test_linear(dtype: DTypeLike, tolerance: float, rows: tuple[int, ...], biased: bool) -> None:
    """Accumulated in float32: off by no more than the one rounding of the result."""
    rng = np.random.default_rng(0)
    x, weight, bias = (
        on_device(rng.normal(size=shape), dtype)
        for shape in ((*rows, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,))
    )
    got = linear(x, weight, bias if biased else None)
    assert got.dtype == dtype
    wide = [np.asarray(each, np.float64) for each in (x, weight, bias)]
    expected = numpy_linear(wide[0], wide[1], wide[2] if biased else None)
    assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=1e-5)


def test_sums_are_accumulated_in_float32() -> None:
    """512 + 1 + ... + 1 is 512 to whoever adds in bfloat16."""
    x = jnp.ones(513, jnp.bfloat16)
    weight = jnp.concatenate([jnp.full(1, 512, jnp.bfloat16), jnp.ones(512, jnp.bfloat16)])
    assert linear(x, weight[None]).item() == 1024


@both_ways
@pytest.mark.parametrize("rows", [1, 16, 70])
def test_bfloat16_times_bfloat16(rows: int) -> None:
    """From 16 rows on XLA's own product is taken."""
    x, weight = random(1, rows, 64, dtype=jnp.bfloat16), random(2, 30, 64, dtype=jnp.bfloat16)
    assert_allclose(np.asarray(linear(x, weight), np.float64), product(x, weight), rtol=2**-8)


@both_ways
@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("rows", [(), (1,), (2, 3), (50,)])
def test_weights_of_16_bits_are_exact(narrow: DTypeLike, rows: tuple[int, ...]) -> None:
    x, other = random(1, *rows, INPUTS), random(2, 9, INPUTS)
    weight = random(3, OUTPUTS, INPUTS, dtype=narrow)
    bias = random(4, OUTPUTS)
    for got, each, added in zip(
        linears(x, [weight, other], [bias, None]), (weight, other), (bias, 0), strict=True
    ):
        assert got.dtype == jnp.float32
        assert_allclose(got, product(x, each) + np.asarray(added), rtol=1e-5, atol=1e-4)


@both_ways
@pytest.mark.parametrize("narrow", NARROW)
def test_one_matrix_of_a_stack(narrow: DTypeLike) -> None:
    x, stack, biases = random(1, 5, 40), random(2, 3, 20, 40, dtype=narrow), random(3, 3, 20)
    for index in range(3):
        got = linear_of_stack(x, stack, biases, jnp.int32(index))
        expected = product(x, stack[index]) + np.asarray(biases[index])
        assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not dense.reads_16_bit_weights(), reason="no custom calls")
@pytest.mark.parametrize("narrow", [jnp.float32, *NARROW])
def test_gate_and_up_in_one(narrow: DTypeLike) -> None:
    x, gate, up = random(1, 2, 3, 40), random(2, 20, 40, dtype=narrow), random(3, 20, 40)
    got = gated_linear(x, gate, up, "relu")
    assert got is not None
    expected = np.maximum(product(x, gate), 0) * product(x, up)
    assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert gated_linear(x, gate, up, "quick_gelu") is None


@pytest.mark.parametrize("narrow", NARROW)
def test_rows_of_a_table_are_converted(narrow: DTypeLike) -> None:
    table, rows = random(1, 30, 8, dtype=narrow), on_device([[3, 29], [0, 3]], jnp.int32)
    got = take_rows(table, rows, jnp.float32)
    assert got.dtype == jnp.float32
    assert np.array_equal(got, np.asarray(table, np.float32)[np.asarray(rows)])

"""Products with packed matrices: kernels in interpret mode against NumPy."""

from __future__ import annotations

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array

from jinfer.quant import bit_packing
from jinfer.quant_format import QuantFormat, Width
from kernels_pallas.matmul import unpack, weight_layout
from kernels_pallas.matmul.prologue import PrologueOperand, identity, prepare_rows
from kernels_pallas.matmul.quantized import KERNEL_ROWS, dequantize, matmul, matmul_partials
from tests.arrays import on_device
from tests.kernels_pallas.helpers import WIDTHS, assert_near, random_matrix, random_rows

run = functools.partial(jax.jit, static_argnames=("backend", "gated", "interpret"))(matmul)
interpret = functools.partial(run, backend="triton", interpret=True)

# Every width with one format of each kind; all of them are tried by `make soak` and on a GPU.
FORMATS = [
    *(QuantFormat(width) for width in WIDTHS),
    QuantFormat("4", 64, symmetric=True),
    QuantFormat("3.5", 128, symmetric=True),
    QuantFormat("8", symmetric=True),
]
ALL = [QuantFormat(w, b, s) for w, b, s in product(WIDTHS, (32, 64, 128), (False, True))]


def test_codes_are_at_their_packed_positions() -> None:
    assert {
        bits: list(pieces) for bits, pieces in bit_packing.PIECES.items()
    } == weight_layout.PIECES


def test_pairs_are_split_exactly() -> None:
    v = np.arange(121)
    f = on_device(1 + v / 128, jnp.float16)[None]
    one = unpack.ScaleAndBase(jnp.ones_like(f), jnp.zeros_like(f))
    first, second = unpack.weights(f, [one, one], 11, asm=False)
    np.testing.assert_array_equal(np.asarray(first[0]), 16 + v // 11)
    np.testing.assert_array_equal(np.asarray(second[0]), v % 11)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_decodes_as_the_reference(format: QuantFormat) -> None:
    matrix, values = random_matrix(format, (2, 3, 1500))
    np.testing.assert_allclose(np.asarray(matrix.dequantize()), values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_every_format(format: QuantFormat) -> None:
    matrix, values = random_matrix(format, (17, 1500))
    x = random_rows(3, 1500)
    (y,) = interpret(on_device(x), [matrix])
    assert_near(y, x, values)


@pytest.mark.soak
@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_every_format_and_size(format: QuantFormat, rows: int) -> None:
    matrix, values = random_matrix(format, (130, 3000))
    x = random_rows(rows, 3000)
    (y,) = interpret(on_device(x), [matrix])
    assert_near(y, x, values)


@settings(max_examples=3)
@given(
    st.sampled_from(["2", "4", "8"]),
    st.sampled_from([1, 2, 16, 33]),
    st.integers(1, 140),
    st.integers(1, 2100),
)
def test_odd_shapes(width: Width, rows: int, outputs: int, inputs: int) -> None:
    matrix, values = random_matrix(QuantFormat(width), (outputs, inputs))
    x = random_rows(rows, inputs)
    (y,) = interpret(on_device(x), [matrix])
    # In a row of two weights nearly all of a base's rounding can be left.
    assert_near(y, x, values, 4e-3)


@pytest.mark.parametrize("width", ["4", "3.5"])
def test_each_superblock_of_x_has_a_power_of_two(width: Width) -> None:
    matrix, values = random_matrix(QuantFormat(width), (1, 20, 2100))
    x = random_rows(3, 2100)
    x[:, 1024:2048] *= 1e-6  # nothing of it were left in fp16 beside the others

    @jax.jit
    def parts(x: Array) -> Array:
        given, _ = prepare_rows(
            [PrologueOperand(x, "full")], identity, 3, matrix, apart=True, interpret=True
        )
        return jnp.concatenate(matmul_partials(given, [matrix], interpret=True)[0])

    each = parts(on_device(x)).reshape(3, 3, 20)
    for n in range(3):
        inputs = slice(1024 * n, 1024 * (n + 1))
        assert_near(each[n], x[:, inputs], values[0][:, inputs])


def test_matrices_of_a_stack_that_share_x() -> None:
    formats = QuantFormat("4"), QuantFormat("8", symmetric=True), QuantFormat("3.5")
    built = [random_matrix(f, (3, n, 1024), n) for f, n in zip(formats, (70, 20, 33), strict=True)]
    x = random_rows(5, 1024)
    results = interpret(on_device(x), [m for m, _ in built], index=on_device([2], jnp.int32))
    for y, (_, values) in zip(results, built, strict=True):
        assert_near(y, x, values[2])


@pytest.mark.parametrize("inputs", [512, 2048])  # whole; in parts
def test_gate_and_up(inputs: int) -> None:
    gate, g = random_matrix(QuantFormat("4"), (20, inputs), 1)
    up, u = random_matrix(QuantFormat("4"), (20, inputs), 2)
    x = random_rows(2, inputs) / 1e4
    (y,) = interpret(on_device(x), [gate, up], gated=True)
    a, b = x @ g.T, x @ u.T
    np.testing.assert_allclose(np.asarray(y), a / (1 + np.exp(-a)) * b, rtol=5e-3, atol=5e-3)


def test_plain_xla() -> None:
    matrix, values = random_matrix(QuantFormat("3.5"), (2, 40, 600))
    x = random_rows(3, 600)
    (y,) = run(on_device(x), [matrix], index=on_device([1], jnp.int32), backend="xla")
    assert_near(y, x, values[1])


def test_many_rows_of_matrices_that_share_x() -> None:
    """All of them decoded once."""
    formats = QuantFormat("4"), QuantFormat("8", symmetric=True), QuantFormat("3.5")
    built = [random_matrix(f, (3, n, 1500), n) for f, n in zip(formats, (70, 20, 33), strict=True)]
    x = random_rows(KERNEL_ROWS + 1, 1500)
    results = interpret(on_device(x), [m for m, _ in built], index=on_device([2], jnp.int32))
    for y, (_, values) in zip(results, built, strict=True):
        assert_near(y, x, values[2])


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_decoded_in_the_order_of_the_other_factor(format: QuantFormat) -> None:
    built = [random_matrix(format, (2, n, 2048), n) for n in (17, 40)]
    given = [matrix for matrix, _ in built]
    found = dequantize(given, on_device([1], jnp.int32), interpret=True)
    expected = np.concatenate([values[1] for _, values in built])
    ordered = weight_layout.arrange_inputs(on_device(expected), given[0]).reshape(found.shape)
    np.testing.assert_allclose(found, ordered, rtol=2e-3, atol=6e-3 * np.abs(expected).max())


def test_wrong_inputs_are_refused() -> None:
    matrix, _ = random_matrix(QuantFormat("4"), (16, 64))
    with pytest.raises(ValueError, match="x has 65 inputs, the matrix 64"):
        matmul(jnp.zeros((1, 65)), [matrix])
    with pytest.raises(ValueError, match="takes the matrices gate and up, not 1"):
        matmul(jnp.zeros((1, 64)), [matrix], gated=True)
    with pytest.raises(ValueError, match="repack"):
        weight_layout.PackedMatrix(
            jnp.zeros((4, 1, 4, 4, 8), jnp.uint32), matrix.scales, 16, 32, 64
        )

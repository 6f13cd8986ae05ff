"""Products with quantized matrices in plain XLA, against the matrices in full."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfer.ops.matmul.quantized import quantized_matmul
from jinfer.ops.matmul.quantized_xla import quantized_matmul_xla
from jinfer.quant import QuantFormat, QuantizedTensor, parse_format
from jinfer.quant.quantized_tensor import abstract, from_codes

CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FORMATS = [
    QuantFormat("2"),
    QuantFormat("3", symmetric=True),
    QuantFormat("3.5"),
    QuantFormat("3.5", 64, symmetric=True),
    QuantFormat("4"),
    QuantFormat("5", 64),
    QuantFormat("6", 128, symmetric=True),
    QuantFormat("8", symmetric=True),
    QuantFormat("8", 128),
    QuantFormat("4", codebook=CODEBOOK, symmetric=True),
    parse_format("q3_b64_nl"),
    QuantFormat("4", two_level=True),
    QuantFormat("4", 32, symmetric=True, two_level=True, codebook=CODEBOOK),
    QuantFormat("2", 16, two_level=True),
    QuantFormat("3", 16, symmetric=True, two_level=True),
    QuantFormat("6", 16, symmetric=True, two_level=True),
]
product = jax.jit(quantized_matmul_xla)


@jax.jit
def reference(x: Any, weight: QuantizedTensor) -> tuple[Any, Any]:
    """The product, and the sum of its terms' magnitudes."""
    whole = weight.dequantize()
    return jnp.dot(x, whole.T, precision="highest"), jnp.abs(x) @ jnp.abs(whole).T


def matrix(format: QuantFormat, outputs: int, inputs: int, seed: int = 0) -> QuantizedTensor:
    """Random codes and numbers; every code occurs."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, format.levels, (outputs, inputs), np.uint8)
    shape = (outputs, -(-inputs // format.block), format.numbers)
    if format.two_level:
        scales = rng.integers(-32, 64, shape).astype(np.int8)
        steps = rng.standard_normal((outputs, -(-inputs // 256), format.numbers))
        return from_codes(codes, scales, format, steps=steps.astype(np.float16))
    return from_codes(codes, rng.standard_normal(shape).astype(np.float16), format)


def check(weight: QuantizedTensor, rows: int) -> None:
    """The error is relative to the terms' magnitudes, which is what rounding grows with."""
    x = np.random.default_rng(1).standard_normal((rows, weight.inputs)).astype(np.float32)
    got = np.asarray(product(x, weight))
    expected, size = (np.asarray(part) for part in reference(x, weight))
    assert got.shape == (rows, weight.outputs)
    assert got.dtype == np.float32
    if weight.format.symmetric and weight.format.codebook is None:
        size = 2 * size  # the products of codes that are taken off again
    np.testing.assert_array_less(np.abs(got - expected), 2e-6 * size + 1e-6)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: repr(format)[12:-1])
def test_every_format(format: QuantFormat) -> None:
    for rows in (1, 9):
        check(matrix(format, 21, 512), rows)


@settings(max_examples=10)
@given(
    format=st.sampled_from(FORMATS),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 1300),
    rows=st.sampled_from([2, 5, 8, 40]),
    seed=st.integers(0, 100),
)
def test_every_shape(format: QuantFormat, outputs: int, inputs: int, rows: int, seed: int) -> None:
    check(matrix(format, outputs, inputs, seed), rows)


def test_matrices_decoded_in_parts() -> None:
    """The last part overlaps the one before it."""
    weight = matrix(QuantFormat("4"), 1100, 576)
    check(weight, 9)


def test_non_finite_numbers() -> None:
    """They reach only the outputs and rows that they belong to."""
    x = np.ones((3, 576), np.float32)
    x[1, 100] = np.nan
    finite = np.isfinite(np.asarray(product(x, matrix(QuantFormat("4"), 40, 576))))
    np.testing.assert_array_equal(finite.all(axis=1), [True, False, True])


def test_small_scales_are_kept() -> None:
    """Float16 has numbers under 6e-5, which are subnormal."""
    format = QuantFormat("4", symmetric=True)
    codes = np.full((16, 64), 15, np.uint8)
    weight = from_codes(codes, np.full((16, 2, 1), 2.0**-24, np.float16), format)
    got = np.asarray(product(np.ones((1, 64), np.float32), weight))
    np.testing.assert_allclose(got, 64 * 7 * 2.0**-24, rtol=1e-6)


@pytest.mark.parametrize(
    "format", [QuantFormat("4"), QuantFormat("8", symmetric=True), QuantFormat("3.5")], ids=str
)
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_temporaries(format: QuantFormat, rows: int) -> None:
    """Of an output layer's product: under 50 MB, where the weights take 113 MB in float32."""
    weight: Any = abstract((49152, 576), format)
    x = jax.ShapeDtypeStruct((rows, 576), jnp.float32)
    memory = product.lower(x, weight).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 50e6


def test_matrices_of_different_codebooks_in_one_call() -> None:
    """As the blocks of a file may have it: queries in one type, keys in another."""
    other = tuple(value // 3 for value in CODEBOOK)
    weights = [
        matrix(QuantFormat("4", codebook=book, symmetric=True), 24, 96, seed)
        for seed, book in enumerate((CODEBOOK, other))
    ]
    x = np.random.default_rng(2).standard_normal((3, 96)).astype(np.float32)
    for got, weight in zip(jax.jit(quantized_matmul)(x, weights), weights, strict=True):
        target, terms = reference(x, weight)
        # Activations are rounded to 8 bits where there are custom calls.
        assert np.abs(np.asarray(got) - target).max() < 0.002 * float(terms.max())

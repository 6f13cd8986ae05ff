"""The custom call for products with plain numbers as whole numbers, against their definition."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from jinfer.cpu import build_library
from jinfer.quant.quantized_tensor import QuantizedTensor, from_codes
from jinfer.quant_format import F16_AS_INT, QuantFormat
from tests.cpu.helpers import FUNCTIONS, every_isa, isas
from tests.cpu.test_quantized_matmul import (
    activations,
    assert_product,
    expected,
    matrix,
    rounded,
    run,
)

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")

LARGEST = 1 << 13  # codes that `whole_numbers` gives
LIMIT = np.float32(8191)  # of activations


def wide(
    outputs: int, inputs: int, *, stack: tuple[int, ...] = (), seed: int = 0
) -> QuantizedTensor:
    """Random codes and powers of two."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-LARGEST, LARGEST + 1, (*stack, outputs, inputs)) + F16_AS_INT.zero
    blocks = (*stack, outputs, -(-inputs // F16_AS_INT.block), 1)
    scales = np.exp2(rng.integers(-20, -8, blocks)).astype(np.float16)
    return from_codes(codes.astype(np.uint16), scales, F16_AS_INT)


def rounded_to_14_bits(x: np.ndarray) -> np.ndarray:
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(LIMIT, largest, out=np.zeros_like(largest), where=largest >= 1e-30)
    values = np.rint(blocks * inverse) * (largest / LIMIT)
    return values.reshape(len(x), -1)[:, : x.shape[1]]


@pytest.mark.parametrize(
    ("outputs", "inputs", "rows"), [(37, 576, 9), (1, 64, 1), (8, 100, 3), (150, 1600, 70)]
)
def test_product(outputs: int, inputs: int, rows: int) -> None:
    tensor, x = wide(outputs, inputs), activations(rows, inputs)
    x[:, :40] = 0  # a block of zeros
    for isa in every_isa():
        with build_library.lowered_isa(isa):
            (got,) = run(x, [tensor])
        assert_product(got, rounded_to_14_bits(x), tensor, 1e-6)


def test_near_the_product_of_unrounded_activations() -> None:
    tensor, x = wide(64, 1024), activations(4, 1024)
    (got,) = run(x, [tensor])
    want = expected(x, tensor)
    assert np.linalg.norm(got - want) < 2e-4 * np.linalg.norm(want)


@pytest.mark.parametrize("inputs", [576, 5632])
def test_bits_do_not_depend_on_the_number_of_rows(inputs: int) -> None:
    tensor, x = wide(72, inputs), activations(67, inputs)
    for isa in isas():
        with build_library.lowered_isa(isa):
            (every,) = run(x, [tensor])
            for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33):
                (got,) = run(x[-rows:], [tensor])
                np.testing.assert_array_equal(got, every[-rows:])


@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_the_largest_codes_and_activations(rows: int) -> None:
    """The sums of a column's products fit into 32 bits."""
    codes = np.full((35, 256), LARGEST)
    codes[::3] = -LARGEST
    codes[1, ::2] *= -1
    tensor = from_codes(
        (codes + F16_AS_INT.zero).astype(np.uint16), np.ones((35, 4, 1)), F16_AS_INT
    )
    x = np.ones((rows, 256), np.float32)
    x[1::2] = -1
    x[0, 1::2] = -1
    for isa in isas():
        with build_library.lowered_isa(isa):
            (got,) = run(x, [tensor])
        assert_product(got, x, tensor, 1e-6)


def test_with_a_matrix_of_fewer_bits() -> None:
    tensors = [
        wide(48, 512),
        matrix(QuantFormat("8", symmetric=True), 17, 512),
        wide(9, 512, seed=1),
    ]
    x = activations(6, 512)
    for isa in isas():
        with build_library.lowered_isa(isa):
            results = run(x, tensors)
            finer = run(x, tensors, mode="int16")
        for got, tensor in zip(results, tensors, strict=True):
            rounding = rounded_to_14_bits if tensor.format == F16_AS_INT else rounded
            assert_product(got, rounding(x), tensor, 2e-6)
        for which in (0, 2):  # the one way that there is
            np.testing.assert_array_equal(finer[which], results[which])


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_gated(activation: str) -> None:
    gate, up = (wide(100, 320, seed=seed) for seed in (1, 2))
    for rows in (1, 20):
        x = activations(rows, 320) / 64
        for isa in isas():
            with build_library.lowered_isa(isa):
                (got,) = run(x, [gate, up], activation=activation)
                one, two = run(x, [gate, up])
            want = FUNCTIONS[activation](one.astype(np.float64)) * two
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-30)


def test_of_a_stack() -> None:
    tensor, offsets = wide(40, 256, stack=(6,)), (0, 0, 1, 12, 12, 13, 130)
    x = activations(offsets[-1], 256)
    for isa in isas():
        with build_library.lowered_isa(isa):
            (got,) = run(x, [tensor], offsets=np.array(offsets, np.int32))
            (third,) = run(x, [tensor], index=np.int32(3))
        assert_product(third, rounded_to_14_bits(x), tensor[3], 1e-6)
        for index, (begin, end) in enumerate(pairwise(offsets)):
            rows = slice(begin, end)
            if begin < end:
                assert_product(got[rows], rounded_to_14_bits(x[rows]), tensor[index], 1e-6)


def test_non_finite_numbers() -> None:
    tensor = wide(20, 128)
    for bad in (np.nan, np.inf, -np.inf):
        x = activations(10, 128)
        x[3, 70] = bad
        for isa in isas():
            with build_library.lowered_isa(isa):
                (got,) = run(x, [tensor])
            assert np.isnan(got[3]).all()
            assert np.isfinite(got[np.arange(10) != 3]).all()

"""The custom call for products with quantized matrices, against the matrices in full."""

from __future__ import annotations

import functools
import threading
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfer.cpu import build_library
from jinfer.cpu.matmul_call import Mode, QuantizedMatrix, quantized_linear, supports
from jinfer.quant.quantized_tensor import QuantizedTensor, from_codes, with_columns
from jinfer.quant_format import QuantFormat, Width, parse_format
from tests.cpu.helpers import FUNCTIONS, every_isa, isas

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")

WIDTHS: tuple[Width, ...] = ("2", "3", "3.5", "4", "5", "6", "8")
CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TWO_LEVEL: tuple[tuple[Width, int, bool], ...] = (
    ("2", 16, False),
    ("3", 16, True),
    ("4", 32, False),
    ("5", 32, False),
    ("6", 16, True),
)


def matrix(
    format: QuantFormat,
    outputs: int,
    inputs: int,
    *,
    stack: tuple[int, ...] = (),
    seed: int = 0,
) -> QuantizedTensor:
    """Random codes and numbers: every code occurs."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, format.levels, (*stack, outputs, inputs), np.uint8)
    shape = (*stack, outputs, -(-inputs // format.block), format.numbers)
    if format.two_level:
        scales = rng.integers(-32, 64, shape).astype(np.int8)
        steps = rng.standard_normal((*shape[:-2], -(-inputs // 256), format.numbers))
        return from_codes(codes, scales, format, steps=steps.astype(np.float16))
    scales = rng.standard_normal(shape).astype(np.float16)
    return from_codes(codes, scales, format)


def coded(tensor: QuantizedTensor) -> QuantizedMatrix:
    format = tensor.format
    return QuantizedMatrix(
        tensor.words,
        tensor.scales,
        tensor.steps,
        tensor.outputs,
        format.block,
        format.per_code,
        format.zero,
        format.codebook,
    )


@functools.partial(jax.jit, static_argnames=("mode", "activation"))
def _run(
    x: Any, tensors: list[QuantizedTensor], mode: Mode, activation: str, which: dict[str, Any]
) -> Any:
    matrices = [coded(tensor) for tensor in tensors]
    return quantized_linear(x, matrices, mode=mode, activation=activation, **which)


def run(
    x: Any,
    tensors: list[QuantizedTensor],
    mode: Mode = "int8",
    activation: str = "none",
    **which: Any,
) -> tuple[np.ndarray, ...]:
    """Waits for the results, so that they are of the instructions chosen when it is called."""
    return tuple(np.asarray(result) for result in _run(x, tensors, mode, activation, which))


def rounded(x: np.ndarray, mode: Mode = "int8") -> np.ndarray:
    """The rounding of a mode, as linear.py defines it."""
    largest = np.float32(127 * 253 ** ("int8", "int16", "float").index(mode))
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    max_value = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(largest, max_value, out=np.zeros_like(max_value), where=max_value >= 1e-30)
    values = np.rint(blocks * inverse) * (max_value / largest)
    return values.reshape(len(x), -1)[:, : x.shape[1]]


def expected(x: np.ndarray, tensor: QuantizedTensor) -> np.ndarray:
    return x.astype(np.float64) @ np.asarray(tensor.dequantize()).astype(np.float64).T


def assert_product(
    got: np.ndarray, x: np.ndarray, tensor: QuantizedTensor, tolerance: float
) -> None:
    """Relative to the sum of the terms' magnitudes, which is what rounding errors grow with."""
    full = np.abs(np.asarray(tensor.dequantize())).astype(np.float64)
    size = np.abs(x).astype(np.float64) @ full.T
    if tensor.format.symmetric and tensor.format.codebook is None:
        size *= 2  # the products of codes that are taken off again
    np.testing.assert_array_less(np.abs(got - expected(x, tensor)), tolerance * size + 1e-6)


def activations(rows: int, inputs: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, inputs)).astype(np.float32)


def check(tensor: QuantizedTensor, rows: int) -> None:
    x = activations(rows, tensor.inputs)
    x[:, :40] = 0  # a block of zeros
    for isa in every_isa():
        with build_library.lowered_isa(isa):
            (got,) = run(x, [tensor])
            (finer,) = run(x, [tensor], mode="int16")
            (exact,) = run(x, [tensor], mode="float")
        assert_product(got, rounded(x), tensor, 2e-6)
        assert_product(finer, rounded(x, "int16"), tensor, 2e-6)
        assert_product(exact, x, tensor, 2e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_widths(width: Width, symmetric: bool) -> None:
    check(matrix(QuantFormat(width, symmetric=symmetric), 37, 576), 9)


@pytest.mark.parametrize(("width", "block", "symmetric"), TWO_LEVEL)
def test_two_level_formats(width: Width, block: int, symmetric: bool) -> None:
    format = QuantFormat(width, block, symmetric, two_level=True)
    check(matrix(format, 21, 768), 5)


def test_codebook() -> None:
    for block, two_level in ((32, False), (64, False), (32, True), (16, True)):
        format = QuantFormat("4", block, True, two_level, CODEBOOK)
        tensor = matrix(format, 19, 512)
        assert supports(coded(tensor))
        check(tensor, 13)


@pytest.mark.parametrize("name", ["q2_b64_nl", "q3_b64_nl", "q3_b128_nl", "q4_b64_nl"])
def test_tables(name: str) -> None:
    tensor = matrix(parse_format(name), 19, 512)
    assert supports(coded(tensor))
    check(tensor, 13)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_largest_codes_and_activations(width: Width, symmetric: bool) -> None:
    """Sums of a block's products never overflow, in any accumulator."""
    format = QuantFormat(width, symmetric=symmetric)
    outputs, inputs = 35, 256
    codes = np.full((outputs, inputs), format.levels - 1, np.uint8)
    codes[::3] = 0
    codes[1, ::2] = 0
    scales = np.ones((outputs, inputs // format.block, format.numbers), np.float16)
    tensor = from_codes(codes, scales, format)
    for rows in (1, 2, 9, 33):
        x = np.ones((rows, inputs), np.float32)
        x[1::2] = -1
        x[0, 1::2] = -1
        for isa in isas():
            with build_library.lowered_isa(isa):
                (got,) = run(x, [tensor])
            assert_product(got, x, tensor, 2e-6)


@settings(max_examples=15)
@given(
    width=st.sampled_from(WIDTHS),
    block=st.sampled_from((32, 64, 128)),
    symmetric=st.booleans(),
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 700),
    rows=st.sampled_from((1, 2, 3, 7, 8, 15, 33)),
)
def test_any_shape(
    width: Width, block: int, symmetric: bool, outputs: int, inputs: int, rows: int
) -> None:
    check(matrix(QuantFormat(width, block, symmetric), outputs, inputs), rows)


def test_other_layouts_have_no_kernels() -> None:
    """Nothing on a CPU makes them; kernels for all of them are half as much code again."""
    two_level = QuantFormat("4", 32, False, two_level=True)
    for format in (QuantFormat("4"), QuantFormat("4", 128), two_level):
        tensor = matrix(format, 20, 512)
        assert supports(coded(tensor))
        for columns in {4, 8, 16} - {tensor.columns}:
            if columns > 4 or not format.two_level:
                assert not supports(coded(with_columns(tensor, columns)))


@pytest.mark.parametrize(("outputs", "inputs", "rows"), [(150, 2880, 300), (40, 5632, 20)])
def test_large_products_are_cut_into_pieces(outputs: int, inputs: int, rows: int) -> None:
    tensor = matrix(QuantFormat("4", symmetric=True), outputs, inputs)
    x = activations(rows, inputs)
    for isa in isas()[1:] or isas():
        with build_library.lowered_isa(isa):
            (got,) = run(x, [tensor])
        assert_product(got, rounded(x), tensor, 2e-6)


def test_near_the_product_of_unrounded_activations() -> None:
    tensor, x = matrix(QuantFormat("8", symmetric=True), 64, 1024), activations(4, 1024)
    (got,) = run(x, [tensor])
    want = expected(x, tensor)
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)


def test_several_matrices_share_a_call() -> None:
    tensors = [
        matrix(QuantFormat("4"), 48, 512, seed=1),
        matrix(QuantFormat("6", symmetric=True), 17, 512, seed=2),
        matrix(QuantFormat("3.5", 64), 33, 512, seed=3),
    ]
    x = activations(6, 512)
    for isa in isas():
        with build_library.lowered_isa(isa):
            results = run(x, tensors)
        for got, tensor in zip(results, tensors, strict=True):
            assert_product(got, rounded(x), tensor, 2e-6)


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_gated(activation: str) -> None:
    gate, up = (matrix(QuantFormat("4"), 100, 320, seed=seed) for seed in (1, 2))
    for rows in (1, 20):
        x = activations(rows, 320) / 64
        for isa in isas():
            with build_library.lowered_isa(isa):
                (got,) = run(x, [gate, up], mode="float", activation=activation)
                one, two = run(x, [gate, up], mode="float")
            want = FUNCTIONS[activation](one.astype(np.float64)) * two
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_digits(rows: int, block: int) -> None:
    """A weight of 1 gives the rounded activation, of any magnitude among others."""
    codes, scales = np.zeros((32, 256), np.uint8), np.zeros((32, 256 // block, 2), np.float16)
    codes[:, :32] = np.eye(32)
    scales[:, 0, 0] = 1
    tensor = from_codes(codes, scales, QuantFormat("8", block))
    rng = np.random.default_rng(rows)
    x = (rng.standard_normal((rows, 256)) * 10 ** rng.uniform(-6, 6, (rows, 256))).astype(
        np.float32
    )
    max_value = np.abs(x[:, :32]).max(axis=-1, keepdims=True)
    for isa in isas():
        with build_library.lowered_isa(isa):
            (finer,) = run(x, [tensor], mode="int16")
            (exact,) = run(x, [tensor], mode="float")
        assert (np.abs(finer - x[:, :32]) / max_value).max() < 1.001 / (2 * 127 * 253)
        assert (np.abs(exact - x[:, :32]) / max_value).max() < 3e-7  # scales are rounded too


def test_matrix_of_a_stack() -> None:
    tensor = matrix(QuantFormat("3"), 40, 256, stack=(5,))
    x = activations(3, 256)
    for index in range(5):
        (got,) = run(x, [tensor], index=np.int32(index))
        assert_product(got, rounded(x), tensor[index], 2e-6)


@pytest.mark.parametrize("offsets", [(0, 0, 1, 12, 12, 13, 30), (0, 0, 3, 120, 121, 140, 230)])
def test_rows_sorted_by_matrix(offsets: tuple[int, ...]) -> None:
    stack = [matrix(QuantFormat(width), 40, 256, stack=(6,)) for width in ("4", "8")]
    x = activations(offsets[-1], 256)
    for isa in isas():
        with build_library.lowered_isa(isa):
            results = run(x, stack, offsets=np.array(offsets, np.int32))
        for got, tensor in zip(results, stack, strict=True):
            for index, (begin, end) in enumerate(pairwise(offsets)):
                rows = slice(begin, end)
                if begin < end:
                    assert_product(got[rows], rounded(x[rows]), tensor[index], 2e-6)


def test_index_outside_the_stack_is_refused() -> None:
    tensor = matrix(QuantFormat("4"), 16, 64, stack=(2,))
    with pytest.raises(Exception, match="no such matrix in the stack"):
        run(activations(1, 64), [tensor], index=np.int32(2))


def test_non_finite_numbers() -> None:
    tensor = matrix(QuantFormat("4"), 20, 128)
    for bad in (np.nan, np.inf, -np.inf):
        x = activations(10, 128)
        x[3, 70] = bad
        for isa in isas():
            with build_library.lowered_isa(isa):
                (got,) = run(x, [tensor])
                (exact,) = run(x, [tensor], mode="float")
            assert np.isnan(got[3]).all()
            assert not np.isfinite(exact[3]).all()
            others = np.arange(10) != 3
            assert np.isfinite(got[others]).all()
            assert np.isfinite(exact[others]).all()


def test_no_rows() -> None:
    (got,) = run(np.zeros((0, 64), np.float32), [matrix(QuantFormat("4"), 16, 64)])
    assert got.shape == (0, 16)


def test_concurrent_calls() -> None:
    tensor, x = matrix(QuantFormat("4"), 512, 512), activations(16, 512)
    (want,) = run(x, [tensor])
    results: list[Any] = []

    def many() -> None:
        for _ in range(30):
            results.append(run(x, [tensor])[0])

    threads = [threading.Thread(target=many, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 180
    assert all(np.array_equal(result, want) for result in results)

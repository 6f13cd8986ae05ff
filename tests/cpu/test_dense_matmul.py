"""The custom call for products with plain matrices, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jinfer.cpu import build_library
from jinfer.cpu.matmul_call import dense_linear
from jinfer.ops.backend import target_platform
from jinfer.ops.matmul.dense import (
    dense_matmul,
    matmul_per_head,
)
from tests.arrays import on_device
from tests.cpu.helpers import BF16, FUNCTIONS, isas

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")

TYPES = ("float32", "bfloat16", "float16")


@partial(jax.jit, static_argnames=("activation", "rounded"))
def _run(x: Any, weights: Any, activation: str, index: Any, rounded: bool) -> Any:
    return dense_linear(x, weights, activation=activation, index=index, rounded=rounded)


def run(
    x: np.ndarray,
    weights: Sequence[Any],
    activation: str = "none",
    index: int | None = None,
    rounded: bool = False,
) -> list[np.ndarray]:
    """Waits for the results, so that they are of the instructions chosen when it is called."""
    which = None if index is None else np.int32(index)
    return [np.asarray(y) for y in _run(x, list(weights), activation, which, rounded)]


def matrix(type: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Random numbers of the type."""
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(type))


def within_nan(weight: np.ndarray) -> np.ndarray:
    """A stack in which the matrix has index 1, and is surrounded by numbers that are none."""
    nan = np.full_like(weight, np.nan)
    return np.stack([nan, weight, nan])


def check(got: np.ndarray, x: np.ndarray, weight: np.ndarray) -> None:
    """Relative to the sum of the terms' magnitudes, which is what rounding errors grow with."""
    wide = weight.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(wide).T
    assert got.dtype == np.float32
    np.testing.assert_array_less(np.abs(got - x.astype(np.float64) @ wide.T), 1e-6 * size + 1e-30)


def on_all(check_one: Callable[[], None]) -> None:
    for isa in isas():
        with build_library.lowered_isa(isa):
            check_one()


any_shape = given(
    type=st.sampled_from(TYPES),
    rows=st.one_of(st.integers(1, 40), st.integers(41, 300)),
    inputs=st.integers(1, 600),
    outputs=st.integers(1, 150),
)


@settings(max_examples=24)
@any_shape
def test_any_shape(type: str, rows: int, inputs: int, outputs: int) -> None:
    x, weight = matrix("float32", rows, inputs, seed=1), matrix(type, outputs, inputs)
    stack = within_nan(weight)
    on_all(lambda: check(run(x, [stack], index=1)[0], x, weight))


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    return x.astype(jnp.bfloat16).astype(np.float32)


@settings(max_examples=24)
@any_shape
def test_rounded_to_the_weights_type(type: str, rows: int, inputs: int, outputs: int) -> None:
    """Where the processor multiplies bfloat16; other types are exact."""
    x, weight = matrix("float32", rows, inputs, seed=1), matrix(type, outputs, inputs)
    stack = within_nan(weight)
    for isa in isas():
        rounds = isa in BF16 and type == "bfloat16"
        with build_library.lowered_isa(isa):
            (got,) = run(x, [stack], index=1, rounded=True)
            check(got, as_bfloat16(x) if rounds else x, weight)
            (alone,) = run(x[-1:], [stack], index=1, rounded=True)
            np.testing.assert_array_equal(alone[0], got[-1])


def sums_of_tiles(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """What TDPBF16PS computes, as Intel's manual says (volume 2): a step is 32 inputs.

    A product of two bfloat16 is exact in float32, and its sum with a float32 in float64 if their
    exponents are close.
    """
    total = np.zeros((len(x), len(weight)), np.float32)
    for step in range(0, x.shape[1], 32):
        parts = np.zeros((2, *total.shape), np.float32)
        for i in range(step, min(step + 32, x.shape[1])):
            product = np.outer(x[:, i], weight[:, i]).astype(np.float64)
            parts[i % 2] = (parts[i % 2] + product).astype(np.float32)
        total += parts[0] + parts[1]
    return total


@pytest.mark.parametrize("inputs", [30, 33, 608])
def test_dot_products_and_tiles_have_the_same_bits(inputs: int) -> None:
    """AVX-512 BF16's and AMX's; few rows, many, and blocks of them, of whole tiles and not."""
    x, weight = matrix("float32", 150, inputs, seed=1), matrix("bfloat16", 85, inputs)
    expected = sums_of_tiles(as_bfloat16(x), weight.astype(np.float32))
    for isa in BF16:
        if isa in isas():
            with build_library.lowered_isa(isa):
                for rows in (1, 2, 19, 45, 150):
                    got = run(x[:rows], [weight], rounded=True)[0]
                    np.testing.assert_array_equal(got, expected[:rows])


@pytest.mark.parametrize("rows", [1, 6, 130])
def test_each_weight_type_of_a_call_has_its_own_rounding(rows: int) -> None:
    x = matrix("float32", rows, 96, seed=3) / 8
    weights = [matrix(type, 150, 96, seed=seed) for seed, type in enumerate(TYPES)]
    for isa in isas():
        with build_library.lowered_isa(isa):
            exact, rounded = (run(x, weights, rounded=rounded) for rounded in (False, True))
            for type, one, other in zip(TYPES, exact, rounded, strict=True):
                same = isa not in BF16 or type != "bfloat16"
                assert (one == other).all() == same
            (got,) = run(x, weights[:2], "silu", rounded=True)
            gate, up = rounded[:2]
            np.testing.assert_allclose(got, FUNCTIONS["silu"](gate) * up, rtol=1e-6, atol=1e-7)


@settings(max_examples=12)
@given(
    type=st.sampled_from(TYPES),
    sizes=st.tuples(st.integers(1, 5), *(st.integers(1, 130) for _ in range(3))),
    rows=st.integers(1, 40),
    transposed=st.booleans(),
)
def test_row_slice_of_each_heads_matrix(
    type: str, sizes: tuple[int, ...], rows: int, transposed: bool
) -> None:
    """Against NumPy, and to the bit against each row alone."""
    heads, before, taken, width = sizes
    weight = matrix(type, heads, before + taken + 1, width)
    weight[:, :before] = weight[:, before + taken :] = np.nan
    part = slice(before, before + taken)
    x = matrix("float32", rows, heads, taken if transposed else width, seed=1)
    run = jax.jit(lambda x: matmul_per_head(x, on_device(weight), part, transposed=transposed))

    def compare() -> None:
        got = np.asarray(run(x))
        for head in range(heads):
            own = weight[head, part]
            check(got[:, head], x[:, head], own.T if transposed else own)
        np.testing.assert_array_equal(np.asarray(run(x[-1:]))[0], got[-1])

    on_all(compare)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_reference_by_heads_agrees(transposed: bool) -> None:
    weight, part = on_device(matrix("float32", 3, 40, 24)), slice(8, 30)
    x = on_device(matrix("float32", 5, 3, 22 if transposed else 24, seed=1))
    got = matmul_per_head(x, weight, part, transposed=transposed)
    with target_platform("tpu"):
        expected = matmul_per_head(x, weight, part, transposed=transposed)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("inputs", [1000, 2100])
def test_one_and_two_rows_have_the_bits_of_many(type: str, inputs: int) -> None:
    """To the bit, whether weights' rows are short or long, which are read in other ways."""
    x, weight = matrix("float32", 8, inputs, seed=1), matrix(type, 61, inputs)

    def compare() -> None:
        [all_rows] = run(x, [weight])
        check(all_rows, x, weight)
        for count in (1, 2):
            np.testing.assert_array_equal(run(x[:count], [weight])[0], all_rows[:count])

    on_all(compare)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 2048, 700), (36, 1100, 300), (37, 1100, 300), (1024, 96, 9)]
)
def test_large_products_are_cut_into_pieces(
    type: str, rows: int, inputs: int, outputs: int
) -> None:
    x, weight = matrix("float32", rows, inputs, seed=1), matrix(type, outputs, inputs)
    on_all(lambda: check(run(x, [weight])[0], x, weight))


@pytest.mark.parametrize("type", ["bfloat16", "float16"])
def test_every_number_of_16_bits_is_exact(type: str) -> None:
    """Each times 1, among zeros; subnormal numbers of bfloat16 may count as 0, as in XLA."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(jnp.dtype(type))
    numbers = numbers[np.isfinite(numbers.astype(np.float32))]
    weight = np.zeros((len(numbers), 18), numbers.dtype)
    weight[np.arange(len(numbers)), np.arange(len(numbers)) % 18] = numbers
    expected = numbers.astype(np.float32)
    small = np.abs(expected) < np.finfo(np.float32).tiny
    for rows, rounded in ((1, False), (40, False), (1, True), (120, True)):
        x = np.ones((rows, 18), np.float32)

        def compare(x: np.ndarray = x, rounded: bool = rounded) -> None:
            for got in run(x, [weight], rounded=rounded)[0]:
                np.testing.assert_array_equal(got[~small], expected[~small])
                assert (np.abs(got[small]) <= np.abs(expected[small])).all()

        on_all(compare)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("rows", [1, 120])
@pytest.mark.parametrize("type", TYPES)
def test_non_finite_numbers(rows: int, type: str, rounded: bool) -> None:
    """They spoil their own row of activations, or of weights, and no other."""
    for bad in (np.nan, np.inf, -np.inf):
        x, weight = matrix("float32", rows, 70, seed=1), matrix(type, 90, 70)
        weight[3, 65], x[rows - 1, 2] = bad, bad

        def compare(x: np.ndarray = x, weight: np.ndarray = weight) -> None:
            (got,) = run(x, [weight], rounded=rounded)
            clean = np.ones_like(got, np.bool_)
            clean[:, 3], clean[rows - 1] = False, False
            assert np.isfinite(got[clean]).all()
            assert not np.isfinite(got[~clean]).any()

        on_all(compare)


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_several_weights_share_a_call(rows: int) -> None:
    x = matrix("float32", rows, 200, seed=9)
    sizes = (130, 1, 64)
    weights = [matrix(type, n, 200, seed=n) for type, n in zip(TYPES, sizes, strict=True)]

    def compare() -> None:
        for got, weight in zip(run(x, weights), weights, strict=True):
            check(got, x, weight)

    on_all(compare)


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("rows", [1, pytest.param(9, marks=pytest.mark.soak), 130])
@pytest.mark.parametrize("type", TYPES)
def test_gated(activation: str, rows: int, type: str) -> None:
    gate, up = (matrix(type, 150, 96, seed=seed) for seed in (1, 2))
    x = matrix("float32", rows, 96, seed=3) / 8
    wide = [x.astype(np.float64) @ each.astype(np.float64).T for each in (gate, up)]
    expected = FUNCTIONS[activation](wide[0]) * wide[1]

    def compare() -> None:
        (got,) = run(x, [gate, up], activation)
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-5)

    on_all(compare)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("rows", [1, 45])
def test_matrix_of_a_stack(type: str, rows: int) -> None:
    x, stack = matrix("float32", rows, 33, seed=1), matrix(type, 4, 70, 33)
    for index in range(4):
        on_all(partial(lambda i: check(run(x, [stack], index=i)[0], x, stack[i]), index))


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("offsets", [(0, 0, 1, 12, 12, 13, 30), (0, 3, 3, 120, 121, 140, 230)])
@pytest.mark.parametrize("type", TYPES)
def test_rows_sorted_by_matrix(type: str, offsets: tuple[int, ...], rounded: bool) -> None:
    """Each row is the same alone; rows that belong to no matrix are not computed."""
    x, stack = matrix("float32", offsets[-1] + 7, 70, seed=1), matrix(type, 6, 90, 70)
    product = jax.jit(partial(dense_linear, rounded=rounded))

    def check_one() -> None:
        (got,) = map(np.asarray, product(x, [stack], offsets=np.array(offsets, np.int32)))
        for index, (begin, end) in enumerate(pairwise(offsets)):
            for row in range(begin, end):
                (alone,) = run(x[row : row + 1], [stack], index=index, rounded=rounded)
                np.testing.assert_array_equal(got[row], alone[0])

    on_all(check_one)


def test_index_outside_the_stack_is_refused() -> None:
    for index in (-1, 2):
        with pytest.raises(Exception, match="no such matrix in the stack"):
            run(matrix("float32", 1, 64), [matrix("float32", 2, 16, 64)], index=index)


@pytest.mark.parametrize(
    ("shapes", "activation", "what"),
    [
        ([(8, 63)], "none", "shape does not fit"),
        ([(2, 8, 64)], "none", "shape does not fit"),
        ([(8, 64), (9, 64)], "silu", "not two weights of one shape"),
    ],
)
def test_mismatched_operands_are_errors(
    shapes: list[tuple[int, ...]], activation: str, what: str
) -> None:
    with pytest.raises(Exception, match=what):
        run(matrix("float32", 1, 64), [matrix("float32", *shape) for shape in shapes], activation)


def test_empty_products() -> None:
    assert run(matrix("float32", 0, 64), [matrix("float16", 16, 64)])[0].shape == (0, 16)
    (got,) = run(matrix("float32", 3, 0), [matrix("bfloat16", 16, 0)])
    assert (got == np.zeros((3, 16))).all()


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("type", TYPES)
def test_the_reference_agrees(rows: int, type: str) -> None:
    """XLA's operations, which stand in where there are no custom calls."""
    x, stack = matrix("float32", rows, 100, seed=1), matrix(type, 3, 70, 100)
    weights = [on_device(stack[0]), on_device(stack[1])]
    with target_platform("tpu"):
        both = dense_matmul(on_device(x), weights)
        (chosen,) = dense_matmul(on_device(x), [on_device(stack)], index=jnp.int32(2))
        (gated,) = dense_matmul(on_device(x), weights, activation="silu")
    for got, weight in zip((*both, chosen), stack, strict=True):
        check(np.asarray(got), x, weight)
    np.testing.assert_allclose(gated, run(x, list(stack[:2]), "silu")[0], rtol=1e-4, atol=1e-4)

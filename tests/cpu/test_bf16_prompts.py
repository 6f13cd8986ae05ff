"""Quantized products of many rows in AMX tiles of bfloat16 (mode "bf16")."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu import build_library
from jinfer.cpu.matmul_call import dense_linear
from jinfer.quant.quantized_tensor import QuantizedTensor
from jinfer.quant_format import QuantFormat
from tests.cpu.helpers import FUNCTIONS, isas
from tests.cpu.test_batch_invariance_of_products import FORMATS
from tests.cpu.test_quantized_matmul import activations, assert_product, matrix, rounded, run

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")

HAS_TILES = build_library.available() and "amx" in isas()
in_tiles = pytest.mark.skipif(not HAS_TILES, reason="needs AMX, or its emulation")
MANY = 33  # rows from which tiles of bfloat16 are used


def in_bf16(x: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(x, jnp.bfloat16))


def as_bf16_matrix(x: np.ndarray, tensor: QuantizedTensor) -> np.ndarray:
    """The product with the decoded matrix in bfloat16, in dot products or tiles."""
    weight = in_bf16(np.asarray(tensor.dequantize()))
    (product,) = dense_linear(jnp.asarray(x), [jnp.asarray(weight)], rounded=True)
    return np.asarray(product)


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@in_tiles
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_product(format: QuantFormat) -> None:
    """To the bit that of a bfloat16 matrix, whose kernel is another one, and near float64's."""
    tensor, x = matrix(format, 75, 776), activations(50, 776)
    x[:, :40] = 0
    with build_library.lowered_isa("amx"):
        (got,) = run(x, [tensor], mode="bf16")
        same_bits(got, as_bf16_matrix(x, tensor))
    decoded = in_bf16(np.asarray(tensor.dequantize())).astype(np.float64)
    size = np.abs(in_bf16(x).astype(np.float64)) @ np.abs(decoded).T
    want = in_bf16(x).astype(np.float64) @ decoded.T
    np.testing.assert_array_less(np.abs(got - want), 2e-6 * size + 1e-6)


@in_tiles
@pytest.mark.parametrize("rows", [33, 47, 48, 49, 64, 95, 160, 700])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (96, 576), (130, 1500), (7, 2048)])
def test_sizes(rows: int, outputs: int, inputs: int) -> None:
    """Row and output tiles that are not whole; inputs in several pieces; rows in several blocks."""
    tensor, x = matrix(QuantFormat("4"), outputs, inputs), activations(rows, inputs)
    with build_library.lowered_isa("amx"):
        same_bits(run(x, [tensor], mode="bf16")[0], as_bf16_matrix(x, tensor))


@in_tiles
def test_rows_from_which_tiles_are_used() -> None:
    tensor, x = matrix(QuantFormat("4"), 64, 576), activations(MANY, 576)
    with build_library.lowered_isa("amx"):
        few = run(x[1:], [tensor], mode="bf16")[0]
        same_bits(few, run(x[1:], [tensor])[0])
        many = run(x, [tensor], mode="bf16")[0]
    assert (many[1:] != few).any()


@in_tiles
def test_rows_of_experts() -> None:
    """Of a stack's matrices some have no row, and some few."""
    stack, offsets = matrix(QuantFormat("6"), 40, 320, stack=(4,)), (0, 70, 70, 71, 140)
    x = activations(offsets[-1], 320)
    with build_library.lowered_isa("amx"):
        (got,) = run(x, [stack], mode="bf16", offsets=np.array(offsets, np.int32))
        for index in (0, 2, 3):
            rows = slice(offsets[index], offsets[index + 1])
            same_bits(got[rows], as_bf16_matrix(x[rows], stack[index]))


@in_tiles
@pytest.mark.parametrize("format", [QuantFormat("4"), QuantFormat("4", 32, two_level=True)])
def test_gated(format: QuantFormat) -> None:
    gate, up = (matrix(format, 100, 320, seed=seed) for seed in (1, 2))
    x = activations(60, 320) / 64
    with build_library.lowered_isa("amx"):
        (got,) = run(x, [gate, up], mode="bf16", activation="silu")
        one, two = run(x, [gate, up], mode="bf16")
    want = FUNCTIONS["silu"](one.astype(np.float64)) * two
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-30)


@in_tiles
def test_non_finite_numbers() -> None:
    x = activations(40, 128)
    x[3, 70] = np.inf
    with build_library.lowered_isa("amx"):
        (got,) = run(x, [matrix(QuantFormat("4"), 20, 128)], mode="bf16")
    assert not np.isfinite(got[3]).any()
    assert np.isfinite(np.delete(got, 3, axis=0)).all()


@in_tiles
def test_error_is_below_that_of_8_bits() -> None:
    tensor, x = matrix(QuantFormat("4", symmetric=True), 64, 1024), activations(64, 1024)
    want = x.astype(np.float64) @ np.asarray(tensor.dequantize()).astype(np.float64).T
    with build_library.lowered_isa("amx"):
        errors = [np.linalg.norm(run(x, [tensor], mode=m)[0] - want) for m in ("bf16", "int8")]
    assert errors[0] < 0.5 * errors[1]


def test_other_instructions_round_to_8_bits() -> None:
    tensor, x = matrix(QuantFormat("4"), 64, 576), activations(2 * MANY, 576)
    for isa in isas():
        if isa != "amx":
            with build_library.lowered_isa(isa):
                (got,) = run(x, [tensor], mode="bf16")
                same_bits(got, run(x, [tensor])[0])
            assert_product(got, rounded(x), tensor, 2e-6)

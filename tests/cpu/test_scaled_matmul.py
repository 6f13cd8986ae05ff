"""The custom call for products with FP8 matrices (E4M3, scaled): to the bit those in float32."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jinfer.cpu import build_library
from jinfer.cpu.matmul_call import ScaledMatrix, dense_linear
from jinfer.ops.fusion.fuse_cpu import FusedFunction
from jinfer.ops.matmul.matmul import grouped_linears, linear, linear_of_stack, linears
from jinfer.quant.scaled_tensor import ScaledTensor
from tests.cpu.helpers import isas

pytestmark = pytest.mark.skipif(not build_library.available(), reason="no C++ compiler")

CODES = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
# Outputs, inputs, blocks of a row: of 128, 64, 32, and whole rows.
SHAPES = [(70, 200, 2), (9, 512, 4), (300, 129, 2), (5, 48, 2), (130, 96, 3), (254, 40, 1)]


def scaled(*shape: int, blocks: int, seed: int = 0) -> ScaledTensor:
    rng = np.random.default_rng(seed)
    numbers = rng.choice(CODES, shape).view(ml_dtypes.float8_e4m3fn)
    return ScaledTensor(numbers, rng.uniform(0.5, 2, (*shape[:-1], blocks)).astype(np.float32))


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


@jax.jit
def run(x: Any, weights: Any) -> Any:
    given = [
        ScaledMatrix(*jax.tree.leaves(one)) if isinstance(one, ScaledTensor) else one
        for one in weights
    ]
    return dense_linear(x, given)


def test_every_number() -> None:
    """By the format's definition: bias 7, 3 bits of mantissa."""
    exponent, mantissa = (CODES >> 3 & 15).astype(int), (CODES & 7).astype(float)
    size = np.where(exponent > 0, 8 + mantissa, mantissa) / 8
    values = np.where(CODES > 127, -1, 1) * size * 2.0 ** (np.maximum(exponent, 1) - 7)
    tensor = ScaledTensor(CODES.view(ml_dtypes.float8_e4m3fn)[:, None], np.ones((254, 1), "f4"))
    for isa in isas():
        with build_library.lowered_isa(isa):
            np.testing.assert_array_equal(run(np.ones((1, 1), "f4"), [tensor])[0][0], values)


@pytest.mark.parametrize(("outputs", "inputs", "blocks"), SHAPES)
def test_bits_equal_float32_and_are_batch_invariant(outputs: int, inputs: int, blocks: int) -> None:
    tensor = scaled(outputs, inputs, blocks=blocks)
    block = 2 ** math.ceil(math.log2(inputs / blocks)) if blocks > 1 else inputs
    scales = tensor.scales[:, np.arange(inputs) // block]
    wide, x = tensor.numbers.astype(np.float32) * scales, random(200, inputs)
    exact = x.astype(np.float64) @ wide.T.astype(np.float64)
    for isa in isas():
        with build_library.lowered_isa(isa):
            (expected,) = run(x, [jnp.asarray(wide)])
            np.testing.assert_allclose(expected, exact, atol=1e-5 * np.abs(exact).max())
            for rows in (1, 2, 5, 200):
                np.testing.assert_array_equal(run(x[:rows], [tensor])[0], expected[:rows], isa)


def test_forms_of_a_product() -> None:
    """Of a stack, of rows sorted by its matrices, gated, and in one call with other operations."""
    stack, x = scaled(3, 40, 160, blocks=2), random(7, 160)
    wide = jnp.asarray(stack.dequantize())
    one = jax.jit(lambda x, stack, i: linear_of_stack(x, stack, None, i))
    np.testing.assert_array_equal(one(x, stack, 1), one(x, wide, 1))
    every = jax.jit(lambda x, stack, o: grouped_linears(x, [stack, stack], o, "silu")[0])
    offsets = np.array([0, 2, 2, 7], np.int32)
    np.testing.assert_array_equal(every(x, stack, offsets), every(x, wide, offsets))

    def chained(x: Any, a: Any, b: Any, c: Any) -> Any:
        y, z = linears(x, [a, b], [None, None])
        return linear(y + z, c)

    given = stack[0], stack[2], scaled(9, 40, blocks=2)
    fused = FusedFunction(chained, (x, *given))
    assert fused.count == 1
    exact = [jnp.asarray(each.dequantize()) for each in given]
    np.testing.assert_array_equal(fused.results(), FusedFunction(chained, (x, *exact)).results())


@pytest.mark.parametrize("blocks", [4, 6, 11])
def test_mismatched_scales_are_errors(blocks: int) -> None:
    """300 inputs have 1, 2, 3, 5 or 10 blocks of a power of two, from 32 on."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="scales are not those of blocks"):
        jax.block_until_ready(run(random(1, 300), [scaled(4, 300, blocks=blocks)]))

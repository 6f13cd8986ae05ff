"""FP8 matrices with scales: blocks, NaN, and values that replace others."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jinfer.quant.scaled_tensor import ScaledTensor, block_of, scaled_tensor, to_e4m3

RNG = np.random.default_rng(2)
E4M3 = ml_dtypes.float8_e4m3fn


def test_blocks_follow_from_the_shapes() -> None:
    assert [block_of(300, blocks) for blocks in (10, 5, 3, 2)] == [32, 64, 128, 256]
    assert block_of(300, 4) is None
    for inputs in range(33, 700, 7):
        for block in (32, 64, 128):
            if inputs > block:
                assert block_of(inputs, -(-inputs // block)) == block


@pytest.mark.parametrize(("inputs", "blocks", "block"), [(300, 3, 128), (70, 3, 32), (40, 1, 40)])
def test_dequantized(inputs: int, blocks: int, block: int) -> None:
    numbers = RNG.normal(size=(3, 6, inputs)).astype(E4M3)
    scales = RNG.normal(size=(3, 6, blocks)).astype(np.float32)
    tensor = ScaledTensor(numbers, scales)
    expected = np.empty(numbers.shape, np.float32)
    for k in range(inputs):
        expected[..., k] = numbers[..., k].astype(np.float32) * scales[..., k // block]
    for each in (tensor, jax.device_put(tensor)):
        np.testing.assert_array_equal(each.dequantize(), expected)
        np.testing.assert_array_equal(
            each[1].take(jnp.array([[5, 0]]), np.float32), expected[1, [[5, 0]]]
        )
    assert tensor.nbytes == 18 * (inputs + 4 * blocks)


def test_nan_is_in_the_scale_of_its_block() -> None:
    """Kernels have no NaN among the numbers; what they multiply with one is none either way."""
    numbers, scales = np.ones((2, 70), E4M3), np.ones((2, 3), np.float32)
    numbers[1, 40] = np.nan
    found = scaled_tensor(numbers, scales).scales
    np.testing.assert_array_equal(np.isnan(found), [[False] * 3, [False, True, False]])


def test_rounded_values() -> None:
    """To 3 bits of mantissa of a block's largest, and a block of zeros to zeros."""
    like = ScaledTensor(np.zeros((4, 96), E4M3), np.zeros((4, 3), np.float32))
    values = RNG.normal(size=(4, 96)).astype(np.float32)
    values[2, 32:64] = 0
    got = to_e4m3(values, like)
    assert got.scales.shape == (4, 3)
    assert np.abs(got.dequantize() - values).max() <= np.abs(values).max() / 16
    np.testing.assert_array_equal(got.dequantize()[2, 32:64], 0)

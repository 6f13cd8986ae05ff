"""Parts of parameters have the very numbers of the whole."""

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jinfer.parallel.shard_params import (
    abstract_shard,
    check_quant_blocks,
    quant_block,
    slice_shard,
)
from jinfer.parallel.sharding_rules import AxisSharding, ShardingError, shard_evenly
from jinfer.quant import ReorderedTensor, parse_format
from jinfer.quant.quantize_matrix import quantize, quantize_with_outliers
from jinfer.quant.quantized_tensor import abstract
from jinfer.quant.scaled_tensor import ScaledTensor

RNG = np.random.default_rng(4)


def sliced(values: np.ndarray, axis: int, share: AxisSharding, part: int) -> np.ndarray:
    """The part as it should be."""
    wanted = np.zeros((*values.shape[:axis], share.size, *values.shape[axis + 1 :]), values.dtype)
    begin, count = share.starts[part], share.counts[part]
    place = (slice(None),) * axis
    wanted[(*place, slice(count))] = values[(*place, slice(begin, begin + count))]
    return wanted


def real(share: AxisSharding, part: int, axis: int) -> tuple[slice, ...]:
    """What of a part is no padding."""
    return (*(slice(None),) * axis, slice(share.counts[part]))


def same_shapes(abstract: Any, values: Any) -> bool:
    """Whether arrays are as they were announced."""
    pairs = zip(jax.tree.leaves(abstract), jax.tree.leaves(values), strict=True)
    same = all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    return same and str(jax.tree.structure(abstract)) == str(jax.tree.structure(values))


def check_parts(whole: Any, axis: int, share: AxisSharding) -> None:
    """Each part of a quantized matrix is as announced, and has the numbers of the whole."""
    check_quant_blocks(whole, {axis: share})
    for part in range(len(share.counts)):
        own = slice_shard(whole, {axis: share}, part)
        assert same_shapes(abstract_shard(whole, {axis: share}), own)
        got = np.asarray(own.dequantize())
        wanted = sliced(np.asarray(whole.dequantize()), axis, share, part)
        here = real(share, part, axis)
        np.testing.assert_array_equal(got[here], wanted[here])


@pytest.mark.parametrize("axis", [0, 1])
def test_plain(axis: int) -> None:
    values = RNG.normal(size=(10, 6)).astype(np.float32)
    share = shard_evenly(values.shape[axis], 4)
    for part in range(4):
        np.testing.assert_array_equal(
            slice_shard(values, {axis: share}, part), sliced(values, axis, share, part)
        )


@pytest.mark.parametrize("name", ["q8", "q3.5", "q4", "q6_b64"])
@pytest.mark.parametrize(
    ("shape", "axis", "devices", "unit"),
    [
        ((64, 96), 0, 4, 1),  # whole tiles
        ((10, 96), 0, 4, 1),  # rows of several tiles
        ((24, 256), 1, 2, 64),  # perhaps whole superblocks
        ((24, 224), 1, 3, 64),  # the last part ends in padding
        ((24, 64), 1, 4, 1),  # parts of a block
        ((3, 24, 192), 2, 2, 64),  # experts
        ((3, 24, 64), 1, 3, 1),
    ],
)
def test_quantized(name: str, shape: tuple[int, ...], axis: int, devices: int, unit: int) -> None:
    values = RNG.normal(size=shape).astype(np.float32)
    check_parts(
        quantize(values, parse_format(name)), axis, shard_evenly(shape[axis], devices, unit)
    )


@pytest.mark.parametrize("shape", [(24, 512), (3, 24, 640)])
@pytest.mark.parametrize(("back", "devices", "unit"), [(1, 2, 128), (1, 4, 128), (2, 3, 8)])
def test_a_block_wider_than_a_superblock(
    shape: tuple[int, ...], back: int, devices: int, unit: int
) -> None:
    """Two superblocks share its numbers: a part has as many of these as half its superblocks."""
    whole = quantize(RNG.normal(size=shape).astype(np.float32), parse_format("q4_b128"))
    axis = len(shape) - back
    check_parts(whole, axis, shard_evenly(shape[axis], devices, unit))


def test_rows_of_padding_are_zeros() -> None:
    whole = quantize(RNG.normal(size=(6, 64)).astype(np.float32), parse_format("q4"))
    share = shard_evenly(6, 4)
    got = np.asarray(slice_shard(whole, {0: share}, 3).dequantize())
    assert share.counts[3] == 0
    assert not got.any()


def test_blocks_of_padding_are_zeros() -> None:
    whole = quantize(RNG.normal(size=(16, 96)).astype(np.float32), parse_format("q4"))
    got = np.asarray(slice_shard(whole, {1: shard_evenly(96, 2, 32)}, 1).dequantize())
    assert got.shape == (16, 64)
    assert not got[:, 32:].any()


@pytest.mark.parametrize("axis", [0, 1])
def test_outliers(axis: int) -> None:
    values = RNG.normal(size=(48, 64)).astype(np.float32)
    whole = quantize_with_outliers(values, parse_format("q4"), 0.05)
    share = shard_evenly(values.shape[axis], 2)
    for part in range(2):
        own = slice_shard(whole, {axis: share}, part)
        assert same_shapes(abstract_shard(whole, {axis: share}), own)
        np.testing.assert_array_equal(
            np.asarray(own.dequantize()),
            sliced(np.asarray(whole.dequantize()), axis, share, part),
        )
        assert (np.diff(own.outliers.rows) >= 0).all()


def test_a_block_that_would_be_torn_apart() -> None:
    whole = abstract((16, 96), parse_format("q4"))
    with pytest.raises(ShardingError, match=r"parts of 48 of its 96 columns .* blocks of 32"):
        check_quant_blocks(whole, {1: shard_evenly(96, 2)})


@pytest.mark.parametrize(
    ("shape", "blocks", "axis", "unit"),
    [((48, 256), 2, 0, 1), ((4, 24, 96), 3, 1, 1), ((20, 256), 4, 1, 64), ((20, 96), 1, 1, 1)],
)
def test_scaled(shape: tuple[int, ...], blocks: int, axis: int, unit: int) -> None:
    """FP8, with its scales."""
    numbers = RNG.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    whole = ScaledTensor(numbers, RNG.normal(size=(*shape[:-1], blocks)).astype(np.float32))
    share = shard_evenly(shape[axis], 2, unit)
    assert quant_block(whole) == {1: 1, 2: 128, 3: 32, 4: 64}[blocks]
    check_parts(whole, axis, share)


@pytest.mark.parametrize(("shape", "axis"), [((48, 64), 0), ((4, 24, 64), 1)])
def test_reordered_inputs(shape: tuple[int, ...], axis: int) -> None:
    """Rows are divided; inputs, which are not where they belong, are not."""
    values = RNG.normal(size=shape).astype(np.float32)
    order = RNG.permuted(np.broadcast_to(np.arange(64, dtype=np.int32), (*shape[:-2], 64)), axis=-1)
    whole = ReorderedTensor(order, quantize(values, parse_format("q4")))
    check_parts(whole, axis, shard_evenly(shape[axis], 2))
    with pytest.raises(ShardingError, match="inputs are reordered"):
        check_quant_blocks(whole, {len(shape) - 1: shard_evenly(64, 2, 32)})

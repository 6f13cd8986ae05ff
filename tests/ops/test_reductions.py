"""Where the greatest number of a row is: the first of equals, by the custom call and by XLA."""

from collections.abc import Iterator
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.cpu import build_library
from jinfer.ops.backend import target_platform
from jinfer.ops.reductions import argmax
from tests.arrays import on_device
from tests.cpu.helpers import isas

WAYS = [None, *(isas() or ["portable"])]  # None: XLA's operations


def found(x: np.ndarray) -> Iterator[np.ndarray]:
    """What each way finds."""
    for way in WAYS:
        target = nullcontext() if way else target_platform("tpu")
        with target, build_library.lowered_isa(way) if way and isas() else nullcontext():
            yield np.asarray(argmax(on_device(x)))


@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 1000, 65_536, 65_537, 140_001])
def test_first_index_of_equal_maxima(size: int) -> None:
    rng = np.random.default_rng(size)
    x = rng.integers(-3, 3, (50 if size < 2000 else 3, size)).astype(np.float32)
    x[0] = -np.inf
    x[1, -1] = np.inf
    x[2, size // 2 :] = 2
    x[2] *= np.where(rng.random(size) < 0.5, -0.0, 1)
    for got in found(x):
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, x.argmax(axis=-1))


@pytest.mark.parametrize("size", [1, 100, 5003, 140_001])
def test_maximum_at_every_index(size: int) -> None:
    rng = np.random.default_rng(size)
    places = np.unique(np.r_[0, size - 1, rng.integers(0, size, 20)])
    x = np.full((len(places), size), -np.inf, np.float32)
    x[np.arange(len(places)), places] = -1e30
    for got in found(x):
        np.testing.assert_array_equal(got, places)


@pytest.mark.parametrize("size", [5, 300, 140_001])
def test_nan_gives_the_last_index(size: int) -> None:
    x = np.random.default_rng(1).standard_normal((6, size)).astype(np.float32)
    for row, place in enumerate((0, 1, size // 2, size - 2, size - 1)):
        x[row, place] = np.nan
    for got in found(x):
        np.testing.assert_array_equal(got, [size - 1] * 5 + [x[5].argmax()])


def test_no_rows() -> None:
    for got in found(np.zeros((0, 9), np.float32)):
        assert got.shape == (0,)


@pytest.mark.skipif(not build_library.available(), reason="no C++ compiler here")
def test_empty_rows_are_an_error() -> None:
    with pytest.raises(Exception, match="empty or too long"):
        jax.block_until_ready(argmax(jnp.zeros((2, 0))))

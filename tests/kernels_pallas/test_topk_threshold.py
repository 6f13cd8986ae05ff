"""Thresholds of a vocabulary by kernels: interpreted, against XLA's bisection and a sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.ops.backend import target_platform
from jinfer.sampling.truncation import top_mass, top_values
from tests.arrays import on_device

VOCAB = 40_000


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((3, VOCAB)).astype(np.float32) * 5
    x[0, ::3] = x[0, 0]
    x[1, 100:] = -np.inf
    return x


def test_threshold_of_the_greatest_values(logits: np.ndarray) -> None:
    weights = np.random.default_rng(1).integers(0, 8, logits.shape).astype(np.float32)
    mass = np.floor(weights.sum(axis=1) * np.array([0.3, 0.001, 1.0], np.float32))  # sums are exact
    with target_platform("gpu", interpret=True):
        kept = np.asarray(jax.jit(top_mass)(*map(on_device, (logits, weights, mass))))
    for row, x in enumerate(logits):
        descending = np.argsort(-x, kind="stable")
        last = np.searchsorted(np.cumsum(weights[row, descending]), mass[row])
        assert np.array_equal(kept[row], x >= x[descending[last]])


def test_count_of_the_greatest(logits: np.ndarray) -> None:
    count = on_device([1, 40, VOCAB + 5], jnp.int32)
    expected = top_values(on_device(logits), count)
    with target_platform("gpu", interpret=True):
        kept = jax.jit(lambda x, count: top_values(x, count))(on_device(logits), count)
    assert np.array_equal(kept, expected)
    assert np.asarray(kept).sum(axis=1).tolist() == [
        (logits[0] == logits[0].max()).sum(),
        40,
        VOCAB,
    ]

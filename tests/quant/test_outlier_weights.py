"""Outliers: weights that are stored exactly, in a sparse matrix, in addition to codes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.quant import OutlierTensor, SparseTensor, parse_format
from jinfer.quant.quantize_matrix import (
    Method,
    find_outliers,
    quantize,
    quantize_with_outliers,
    without_outliers,
)
from jinfer.quant.quantized_tensor import abstract
from jinfer.quant.sparse_matrix import abstract_outliers, outlier_count, to_sparse
from tests.arrays import on_device


def heavy(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Weights of Student's distribution with 3 degrees of freedom."""
    return np.random.default_rng(seed).standard_t(3, shape).astype(np.float32)


def rmse(values: np.ndarray, tensor: object) -> float:
    return float(np.sqrt(((np.asarray(tensor.dequantize()) - values) ** 2).mean()))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["q2", "q3", "q3.5", "q4", "q4_sym"])
@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_error_falls_and_outliers_are_exact(name: str, method: Method) -> None:
    values, format = heavy((200, 300)), parse_format(name)
    plain = rmse(values, quantize(values, format, method=method))
    apart = quantize_with_outliers(values, format, 0.01, method=method)
    assert rmse(values, apart) < 0.85 * plain
    few = quantize_with_outliers(values, format, 0.001, method=method)
    assert rmse(values, apart) < rmse(values, few) < 0.98 * plain
    kept = np.asarray(apart.outliers.dense()) != 0
    assert 0 < kept.sum() <= 600
    full = np.asarray(apart.dequantize())
    np.testing.assert_allclose(full[kept], values[kept], rtol=0, atol=4e-6)
    # They cost about a tenth of a bit at a share of 0.001.
    rest = quantize(values, format).nbytes
    assert few.nbytes - rest == 12 * outlier_count(values.shape, 0.001) == 12 * 60


def test_outliers_with_gptq() -> None:
    values, format = heavy((64, 96)), parse_format("q3")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(500, 96)) @ rng.normal(size=(96, 96))
    errors = [
        np.linalg.norm(x @ (np.asarray(t.dequantize()) - values).T)
        for t in (
            quantize(values, format, method="gptq", hessian=x.T @ x),
            quantize_with_outliers(values, format, 0.01, method="gptq", hessian=x.T @ x),
        )
    ]
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize("symmetric", [False, True])
def test_outliers_with_the_largest_gain_are_chosen(symmetric: bool) -> None:
    """Every way to take 2 weights of two blocks of 8 is tried."""
    format = parse_format("q4_sym" if symmetric else "q4")
    for seed in range(30):
        values = np.tile(heavy((2, 8), seed), 4)  # blocks of 32, each weight four times
        values[:, 8:] = values[:, :1]  # which widens no range
        chosen = find_outliers(values, format, 2)
        assert chosen.sum() <= 2

        def loss(kept: tuple[tuple[int, int], ...], values: np.ndarray = values) -> float:
            total = 0.0
            for row in range(2):
                left = [values[row, k] for k in range(32) if (row, k) not in kept]
                width = 2 * np.abs(left).max() if symmetric else np.ptp(left)
                total += float(width) ** 2
            return total

        places = [(row, k) for row in range(2) for k in range(9)]
        best = min(loss(pair) for pair in itertools.combinations(places, 2))
        mine = loss(tuple((int(r), int(k)) for r, k in zip(*np.nonzero(chosen), strict=True)))
        none = loss(())
        # A pair that only helps together may be cut in half.
        assert mine <= best + 0.5 * (none - best)


def test_importance_changes_the_choice() -> None:
    values, format = heavy((100, 64)), parse_format("q4")
    importance = np.concatenate([np.ones(32), np.full(32, 1e4)])
    chosen = find_outliers(values, format, 50, importance)
    assert chosen.sum() == 50
    assert not chosen[:, :32].any()


def test_no_outliers() -> None:
    format = parse_format("q4")
    assert not find_outliers(np.ones((4, 40), np.float32), format, 10).any()
    assert not find_outliers(heavy((4, 40)), format, 0).any()
    everything = np.ones((2, 40), bool)
    np.testing.assert_array_equal(without_outliers(heavy((2, 40)), everything, 32), 0)
    for share in (0.0, 0.1):  # a share that blocks cannot use leaves places empty
        values = heavy((4, 40)) if share == 0 else np.ones((4, 40), np.float32)
        tensor = quantize_with_outliers(values, format, share)
        assert tensor.outliers.values.shape == (outlier_count(values.shape, share),)
        np.testing.assert_array_equal(tensor.dequantize(), tensor.rounded.dequantize())
        x = jnp.ones((2, 40))
        np.testing.assert_array_equal(tensor.outliers.product(x), np.zeros((2, 4)))
        np.testing.assert_array_equal(tensor.outliers.take(on_device([3])), np.zeros((1, 40)))


def test_stacks() -> None:
    values, format = heavy((2, 3, 40, 100)), parse_format("q3.5")
    tensor = quantize_with_outliers(values, format, 0.01, method="mse")
    like = abstract_outliers(abstract(values.shape, format), outlier_count(values.shape, 0.01))
    for part, other in zip(jax.tree.leaves(tensor), jax.tree.leaves(like), strict=True):
        assert (part.shape, part.dtype) == (other.shape, other.dtype)
    assert (tensor.shape, tensor.stack) == (values.shape, (2, 3))
    one = quantize_with_outliers(values[1, 2], format, 0.01, method="mse")
    np.testing.assert_array_equal(tensor[1, 2].dequantize(), one.dequantize())
    np.testing.assert_allclose(tensor.dequantize()[1, 2], one.dequantize(), rtol=0, atol=1e-5)
    assert one[...] is one
    with pytest.raises(IndexError, match="use take for rows"):
        one[0]


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_product(rows: int) -> None:
    rng = np.random.default_rng(rows)
    where = rng.random((50, 80)) < 0.02
    where[7, :5] = where[49] = True  # a full row, at the end
    matrix = np.where(where, rng.normal(size=(50, 80)), 0).astype(np.float32)
    sparse: SparseTensor = jax.tree.map(on_device, to_sparse(matrix, where, int(where.sum()) + 3))
    np.testing.assert_array_equal(sparse.dense(), matrix)
    x = rng.normal(size=(rows, 80)).astype(np.float32)
    got = jax.jit(SparseTensor.product)(sparse, on_device(x))
    np.testing.assert_allclose(got, x @ matrix.T, rtol=0, atol=1e-5)
    taken = jax.jit(SparseTensor.take)(sparse, on_device([[7, 49], [0, 7]]))
    np.testing.assert_array_equal(taken, matrix[[[7, 49], [0, 7]]])


def test_embedding_lookup_of_rows() -> None:
    values = heavy((30, 64))
    tensor: OutlierTensor = jax.tree.map(
        on_device, quantize_with_outliers(values, parse_format("q6"), 0.02)
    )
    rows = on_device([4, 4, 29])
    full = jax.device_get(tensor).dequantize()
    taken = jax.jit(lambda tensor, rows: tensor.take(rows, jnp.float32))(tensor, rows)
    np.testing.assert_allclose(taken, full[np.asarray(rows)], rtol=0, atol=1e-5)

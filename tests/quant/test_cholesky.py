"""Cholesky factors, against NumPy's."""

import numpy as np
import pytest

from jinfer.quant.gptq import cholesky


@pytest.mark.parametrize("size", [1, 64, 65, 200])
def test_factor_equals_numpys(size: int) -> None:
    x = np.random.default_rng(0).normal(size=(2 * size, size))
    matrix = x.T @ x
    L = cholesky(matrix)
    assert L.dtype == np.float64
    np.testing.assert_allclose(L, np.linalg.cholesky(matrix), rtol=0, atol=1e-9)


@pytest.mark.parametrize("where", [0, 99])
def test_indefinite_matrix_is_an_error(where: int) -> None:
    matrix = np.eye(100)
    matrix[where, where] = -1
    with pytest.raises(np.linalg.LinAlgError):
        cholesky(matrix)

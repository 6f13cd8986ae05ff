"""Cholesky factorization in float64, with XLA's matmul.

BLAS threads would busy-wait and compete with other work. Only blocks small enough for one thread
are left to BLAS.
"""

from __future__ import annotations

import jax
import numpy as np

from jinfer.matmul_precision import matmul

_WHOLE = 64  # rows factored at once


def cholesky(matrix: np.ndarray) -> np.ndarray:
    """The lower triangular L with L L^T = matrix, float64.

    Raises:
        LinAlgError: the matrix is not positive definite.
    """
    with jax.enable_x64(True):
        return _factored(matrix, False)[0]


def _factored(matrix: np.ndarray, inverted: bool) -> tuple[np.ndarray, np.ndarray]:
    """L, and its inverse on request."""
    size = len(matrix)
    if size <= _WHOLE:
        L = np.linalg.cholesky(matrix)
        return L, np.linalg.inv(L) if inverted else L
    half = size // 2
    L, inverse = np.zeros_like(matrix), np.zeros_like(matrix)
    first, last = slice(None, half), slice(half, None)
    L[first, first], before = _factored(matrix[first, first], True)
    L[last, first] = corner = _product(matrix[last, first], before.T)
    rest = matrix[last, last] - _product(corner, corner.T)
    L[last, last], after = _factored(rest, inverted)
    if inverted:
        inverse[first, first], inverse[last, last] = before, after
        inverse[last, first] = -_product(_product(after, corner), before)
    return L, inverse


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(_times(a, b))


_times = jax.jit(matmul)

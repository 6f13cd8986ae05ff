"""Quantization that passes each weight's error on to the weights still to come.

The method of GPTQ (arXiv 2210.17323): what counts is a layer's output on the inputs X that it
meets, so that with H = X^T X the loss is sum_rows (w - w')^T H (w - w'). Columns are rounded one
after the other; with U the upper Cholesky factor of the inverse of H, U^T U = H^-1, the columns not
yet rounded make up best for column i's error by

    w_j -= (w_i - w'_i) / U_ii * U_ij,  j > i

A block's scale and base are searched when its first column comes, on the weights as they are then.
Blocks are taken by falling importance, and so are the columns within each: their order is free,
because a block's numbers belong to its inputs wherever it comes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jinfer.quant.format import QuantFormat
from jinfer.quant.nearest import decoded, in_blocks, nearest_codes
from jinfer.quant.search import search

VERSION = 1  # of the numbers that come of it: weights that were kept depend on it
DAMPING = 0.05  # added to the diagonal of H, as a share of its mean
_ROWS = 4096
_WHOLE = 64  # rows of a triangle that is inverted at once


def feedback(
    values: np.ndarray,
    hessian: np.ndarray,
    format: QuantFormat,
    *,
    exact: np.ndarray | None = None,
    damping: float = DAMPING,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """Codes, scales and bases with a small error of a layer's output.

    Args:
        values: float32 [outputs, inputs].
        hessian: X^T X of the layer's inputs, times any number: [inputs, inputs].
        exact: bool [outputs, inputs], weights that are kept beside the codes.

    Returns:
        As `search`; and float32 [outputs, inputs], the weights when their turn came, which is what
        those kept exactly are to be.

    Raises:
        ValueError: the matrix does not fit, or is not that of any inputs.
    """
    outputs, inputs = values.shape
    factor = _factor(hessian, inputs, format.block, damping)
    parts = [
        _some(values[rows], *factor, format, None if exact is None else exact[rows])
        for rows in few_rows(outputs)
    ]
    codes, scale, base, moved = zip(*parts, strict=True)
    bases = None if format.symmetric else np.concatenate(base)
    return np.concatenate(codes), np.concatenate(scale), bases, np.concatenate(moved)


def few_rows(outputs: int) -> Iterator[slice]:
    """Rows that are computed together: each is by itself, and so many temporaries are small."""
    for begin in range(0, outputs, _ROWS):
        yield slice(begin, min(begin + _ROWS, outputs))


def _some(
    values: np.ndarray,
    upper: np.ndarray,
    order: np.ndarray,
    format: QuantFormat,
    exact: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """`feedback` for some rows."""
    outputs, inputs = values.shape
    left = np.ascontiguousarray(values[:, order])
    blocks = -(-inputs // format.block)
    codes = np.zeros((outputs, blocks * format.block), np.uint8)
    scale = np.zeros((outputs, blocks), np.float16)
    base = None if format.symmetric else np.zeros((outputs, blocks), np.float16)
    for part in _runs(order, format.block):
        columns, n = order[part], order[part.start] // format.block
        here = left[:, part].copy()
        # The greater U_ii, the less its error costs, as others make up for it.
        weights = np.zeros(format.block, np.float32)
        weights[columns % format.block] = np.diag(upper)[part] ** -2.0
        block = np.empty((outputs, format.block), np.float32)
        block[:] = here[:, :1]  # padding widens no range
        block[:, columns % format.block] = here
        if exact is not None:
            block = _without(block, exact, columns, format.block)
        _, step, bottom = search(block, format, weights)
        scale[:, n] = step[:, 0]
        if base is not None and bottom is not None:
            base[:, n] = bottom[:, 0]
        errors = np.empty_like(here)
        for i, column in enumerate(columns):
            now = here[:, i, None, None]
            q = nearest_codes(now, step, bottom, format)
            error = (now - decoded(q, step, bottom, format))[:, 0, 0]
            if exact is not None:
                error[exact[:, column]] = 0
            errors[:, i] = error / upper[part.start + i, part.start + i]
            here[:, i + 1 :] -= errors[:, i, None] * upper[part.start + i, part][i + 1 :]
            codes[:, column] = q[:, 0, 0]
        left[:, part] = here
        left[:, part.stop :] -= errors @ upper[part, part.stop :]
    moved = np.empty_like(left)
    moved[:, order] = left
    return in_blocks(codes, format.block), scale, base, moved


def _factor(
    hessian: np.ndarray, inputs: int, block: int, damping: float
) -> tuple[np.ndarray, np.ndarray]:
    """U in the order of the columns, float32, and that order."""
    if hessian.shape != (inputs, inputs):
        raise ValueError(
            f"the inputs' products are {list(hessian.shape)}, not [{inputs}, {inputs}]; "
            "collect them from the layer whose weight this is"
        )
    H = hessian.astype(np.float64)
    diagonal = np.diag(H)
    mean = float(diagonal.mean())
    if not (np.isfinite(H).all() and mean > 0):
        raise ValueError(
            "the inputs' products are not finite or all 0; calibrate with another text"
        )
    blocks = np.pad(diagonal, (0, -inputs % block)).reshape(-1, block)
    of_block = np.repeat(blocks.mean(axis=1), block)[:inputs]
    order = np.lexsort((-diagonal, np.arange(inputs) // block, -of_block))
    H = H[np.ix_(order, order)]
    H[np.diag_indices(inputs)] += damping * mean
    try:
        # Factored from its last column on, H = R R^T with R upper triangular, so that U is R^-1.
        R = np.linalg.cholesky(H[::-1, ::-1])[::-1, ::-1]
    except np.linalg.LinAlgError as error:
        raise ValueError(
            "the inputs' products are not positive definite; raise the damping"
        ) from error
    return _inverse(R).astype(np.float32), order


def _inverse(upper: np.ndarray) -> np.ndarray:
    """Of an upper triangular matrix; three times faster than what knows nothing of the zeros."""
    size = len(upper)
    if size <= _WHOLE:
        return np.triu(np.linalg.inv(upper))
    half = size // 2
    result = np.zeros_like(upper)
    result[:half, :half] = _inverse(upper[:half, :half])
    result[half:, half:] = _inverse(upper[half:, half:])
    corner = result[:half, :half] @ upper[:half, half:]
    result[:half, half:] = -corner @ result[half:, half:]
    return result


def _runs(order: np.ndarray, block: int) -> Iterator[slice]:
    """The places of each block's columns in the order."""
    begin = 0
    while begin < len(order):
        count = int((order // block == order[begin] // block).sum())
        yield slice(begin, begin + count)
        begin += count


def _without(block: np.ndarray, exact: np.ndarray, columns: np.ndarray, width: int) -> np.ndarray:
    """A block whose weights that are kept exactly are the mean of the others."""
    kept = np.zeros(block.shape, bool)
    kept[:, columns % width] = exact[:, columns]
    others = np.where(kept, 0, block).sum(axis=1) / np.maximum((~kept).sum(axis=1), 1)
    return np.where(kept, others[:, None], block)

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

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float

from jinfer.quant.format import QuantFormat
from jinfer.quant.nearest import decoded, in_blocks, nearest_codes
from jinfer.quant.search import block_weights, numbers, rounded
from jinfer.quant.tiles import by_rows

VERSION = 2  # of the numbers that come of it: weights that were kept depend on it
DAMPING = 0.05  # added to the diagonal of H, as a share of its mean
_WHOLE = 64  # rows of a triangle that is inverted at once


class Factor(NamedTuple):
    """What error feedback needs to know of a layer's inputs.

    Attributes:
        upper: U in the order of `places`, float32, and 1 on its diagonal for padding.
        places: the columns in the order in which they are rounded, block after block, those that
            pad the last block after its others.
    """

    upper: np.ndarray
    places: np.ndarray


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
    block = format.block
    upper, places = factor(hessian, inputs, block, damping)
    real, padded = places < inputs, len(places)
    # The greater U_ii, the less its error costs, as others make up for it.
    weights = np.where(real, np.diag(upper) ** -2.0, 0).astype(np.float32)
    weights = np.stack([block_weights(each, block)[0] for each in weights.reshape(-1, block)])
    lower = upper.T.reshape(-1, block, padded)
    given = [jnp.asarray(each) for each in (lower, weights, real.reshape(-1, block))]

    def some(rows: slice) -> list[np.ndarray]:
        left = values[rows].T[np.where(real, places, 0)]
        kept = None
        if exact is not None:
            kept = (exact[rows].T[np.where(real, places, 0)] & real[:, None]).reshape(
                -1, block, left.shape[1]
            )
        found = _sweep(left.reshape(-1, block, left.shape[1]), *given, kept, format)
        return [np.asarray(each).T for each in found]

    moved, scale, base = by_rows(some, outputs)
    order = np.argsort(places)
    of_block = places[::block] // block
    blocks = np.argsort(of_block)
    moved, scale = moved[:, order], scale[:, blocks]
    bases = None if format.symmetric else base[:, blocks]
    codes = nearest_codes(moved.reshape(outputs, -1, block), scale, bases, format)
    codes.reshape(outputs, padded)[:, inputs:] = 0
    return codes, scale, bases, moved[:, :inputs]


@partial(jax.jit, static_argnums=5)
def _sweep(
    left: Float[Array, "blocks block rows"],
    lower: Float[Array, "blocks block columns"],
    weights: Float[Array, "blocks block"],
    real: Bool[Array, "blocks block"],
    exact: Bool[Array, "blocks block rows"] | None,
    format: QuantFormat,
) -> tuple[Array, Array, Array]:
    """The weights when their turn came [columns, rows], scales and bases [blocks, rows].

    Args:
        lower: U's transpose.
        weights: what a squared error counts, for the search.
        real: columns that are no padding.
    """
    blocks, block, rows = left.shape
    columns = blocks * block

    def one_block(n: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        errors, moved, scales, bases = state
        coupled = lower[n]
        here = left[n] - coupled @ errors
        here = jnp.where(real[n][:, None], here, here[:1])  # padding widens no range
        own = lax.dynamic_slice_in_dim(coupled, n * block, block, 1)  # [to, from]
        diagonal = jnp.diag(own)[:, None]
        within = own.T * (1 - jnp.eye(block))
        kept = jnp.zeros_like(here, bool) if exact is None else exact[n]
        scale, base = numbers(_without(here, kept), weights[n][:, None], format)
        step, floor = (each.astype(jnp.float32)[None] for each in (scale, base))

        def error(now: Array, kept: Array, diagonal: Array) -> Array:
            off = now - rounded(now, step, floor, format)
            return jnp.where(kept, 0, off) / diagonal

        def one_column(i: Array, here: Array) -> Array:
            # Once, not once for each column that it is subtracted from.
            now, fixed, u = (
                lax.dynamic_slice_in_dim(each, i, 1) for each in (here, kept, diagonal)
            )
            off = lax.optimization_barrier(error(now, fixed, u))
            return here - within[i][:, None] * off

        here = lax.fori_loop(0, block, one_column, here)
        off = error(here, kept, diagonal)
        errors = lax.dynamic_update_slice_in_dim(errors, off, n * block, 0)
        moved = lax.dynamic_update_slice_in_dim(moved, here, n * block, 0)
        return errors, moved, scales.at[n].set(scale), bases.at[n].set(base)

    zeros, none = jnp.zeros((columns, rows)), jnp.zeros((blocks, rows), jnp.float16)
    _, *found = lax.fori_loop(0, blocks, one_block, (zeros, zeros, none, none))
    moved, scale, base = found
    return moved, scale, base


def _without(block: Array, kept: Array) -> Array:
    """A block whose weights that are kept exactly are the mean of the others."""
    count = jnp.sum(~kept, axis=0, dtype=jnp.float32)
    others = jnp.where(kept, 0, block).sum(axis=0) / jnp.maximum(count, 1)
    return jnp.where(kept, others[None], block)


def factor(hessian: np.ndarray, inputs: int, block: int, damping: float) -> Factor:
    """U and the order of the columns. Raises `ValueError`."""
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
    padded = np.pad(diagonal, (0, -inputs % block), constant_values=-np.inf)
    sums = np.where(np.isfinite(padded), padded, 0).reshape(-1, block).sum(axis=1)
    places = np.lexsort((-padded, np.arange(len(padded)) // block, -np.repeat(sums, block)))
    at = np.flatnonzero(places < inputs)
    order = places[at]
    H = H[np.ix_(order, order)]
    H[np.diag_indices(inputs)] += damping * mean
    try:
        # Factored from its last column on, H = R R^T with R upper triangular, so that U is R^-1.
        R = np.linalg.cholesky(H[::-1, ::-1])[::-1, ::-1]
    except np.linalg.LinAlgError as error:
        raise ValueError(
            "the inputs' products are not positive definite; raise the damping"
        ) from error
    upper = np.eye(len(padded), dtype=np.float32)
    upper[np.ix_(at, at)] = _inverse(R)
    return Factor(upper, places)


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


def feedback_reference(
    values: np.ndarray,
    hessian: np.ndarray,
    format: QuantFormat,
    *,
    exact: np.ndarray | None = None,
    damping: float = DAMPING,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """The same, column by column in NumPy."""
    outputs, inputs = values.shape
    block = format.block
    upper, places = factor(hessian, inputs, block, damping)
    kept = np.zeros(values.shape, bool) if exact is None else exact
    moved = values.copy()
    blocks = len(places) // block
    scale, base = (np.zeros((outputs, blocks), np.float16) for _ in range(2))
    for begin in range(0, len(places), block):
        columns = [c for c in places[begin : begin + block] if c < inputs]
        part = slice(begin, begin + len(columns))
        here = np.repeat(moved[:, columns[:1]], block, axis=1)  # padding widens no range
        here[:, : len(columns)] = moved[:, columns]
        fixed = np.zeros(here.shape, bool)
        fixed[:, : len(columns)] = kept[:, columns]
        weights = np.zeros(block)
        weights[: len(columns)] = np.diag(upper)[part] ** -2.0
        found = numbers(
            _without(jnp.asarray(here.T), jnp.asarray(fixed.T)),
            jnp.asarray(block_weights(weights, block)[0][:, None]),
            format,
        )
        step, bottom = (np.asarray(each)[:, None] for each in found)
        n = columns[0] // block
        scale[:, n], base[:, n] = step[:, 0], bottom[:, 0]
        low = None if format.symmetric else bottom
        for i, column in enumerate(columns):
            now = moved[:, column, None, None]
            q = nearest_codes(now, step, low, format)
            error = (now - decoded(q, step, low, format))[:, 0, 0]
            error[kept[:, column]] = 0
            after = places[begin + i + 1 :]
            coupling = upper[begin + i, begin + i + 1 :] / upper[begin + i, begin + i]
            real = after < inputs
            moved[:, after[real]] -= error[:, None] * coupling[real]
    bases = None if format.symmetric else base
    whole = np.pad(moved, ((0, 0), (0, -inputs % block)))
    codes = nearest_codes(in_blocks(whole, block), scale, bases, format)
    codes.reshape(outputs, -1)[:, inputs:] = 0
    return codes, scale, bases, moved

"""GPTQ: quantization with error feedback (arXiv 2210.17323), then coordinate descent.

The loss is that of a layer's output on its inputs X: with H = X^T X (the Hessian) it is sum_rows (w
- w')^T H (w - w'). Columns are rounded one after the other. With H = R R^T, R upper triangular, the
loss is the sum of all squares of (w - w') R, whose column j only depends on the errors of columns
up to j; so the best value of column j, given the roundings before it, is what GPTQ computes with
the inverse of R:

    w_j + sum_{i < j} (w_i - w'_i) R_ij / R_jj

A block's scale and base are searched when its first column is reached, on the weights as updated by
then. Blocks are processed by falling importance (act-order), and so are the columns within each:
the order is free, because block numbers belong to inputs. Then `descend` improves codes and scales
one at a time with all others fixed (arXiv 2309.01885): GPTQ rounds each weight once, before it
knows the later roundings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jinfer.matmul_precision import matmul
from jinfer.quant.round_to_nearest import (
    codes_of,
    dequantize,
    levels_of,
    nearest_codes,
    nearest_levels,
    split_into_blocks,
    to_fp16,
)
from jinfer.quant.scale_search import block_weights, dequantized, numbers
from jinfer.quant_format import QuantFormat

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_WHOLE = 64  # rows factored at once


def cholesky(matrix: np.ndarray) -> np.ndarray:
    """Factors a matrix to the lower triangular L with L L^T = matrix (Cholesky), float64.

    Raises:
        LinAlgError: the matrix is not positive definite.
    """
    with jax.enable_x64(True):
        return _factored(matrix, False)[0]


def _factored(matrix: np.ndarray, inverted: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns L, and its inverse on request."""
    size = len(matrix)
    if size <= _WHOLE:
        L = np.linalg.cholesky(matrix)
        return L, np.linalg.inv(L) if inverted else L
    half = size // 2
    L, inverse = np.zeros_like(matrix), np.zeros_like(matrix)
    first, last = slice(None, half), slice(half, None)
    L[first, first], before = _factored(matrix[first, first], True)
    L[last, first] = corner = _matmul64(matrix[last, first], before.T)
    rest = matrix[last, last] - _matmul64(corner, corner.T)
    L[last, last], after = _factored(rest, inverted)
    if inverted:
        inverse[first, first], inverse[last, last] = before, after
        inverse[last, first] = -_matmul64(_matmul64(after, corner), before)
    return L, inverse


def _matmul64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(_times(a, b))


_times = jax.jit(matmul)


_ROWS = 256  # per block: fits the L2 cache, and leaves enough blocks for all threads
_EVEN = 64


def equal_row_blocks(outputs: int) -> Iterator[slice]:
    """Yields blocks of equal size, for one compiled program: the last may overlap."""
    count = -(-outputs // _ROWS)
    size = min(outputs, -(-outputs // count // _EVEN) * _EVEN)
    for begin in range(0, outputs, size):
        start = min(begin, outputs - size)
        yield slice(start, start + size)


def map_row_blocks(work: Callable[[slice], Sequence[np.ndarray]], outputs: int) -> list[np.ndarray]:
    """Applies a function to blocks of rows on several threads, and concatenates its arrays."""
    parts = list(equal_row_blocks(outputs))
    with ThreadPoolExecutor(min(len(parts), 4, os.cpu_count() or 1)) as pool:
        results = pool.map(work, parts)
        whole: list[np.ndarray] = []
        for rows, found in zip(parts, results, strict=True):
            whole = whole or [np.empty((outputs, *part.shape[1:]), part.dtype) for part in found]
            for target, part in zip(whole, found, strict=True):
                target[rows] = part
    return whole


DAMPING = 0.05  # added to the diagonal of H, as a share of its mean


class HessianFactor(NamedTuple):
    """The factored Hessian of a layer's inputs.

    Attributes:
        upper: R in the order of `places`, with 1 on its diagonal for padding.
        places: the columns in the order they are rounded, block after block, padding of the last
            block at its end.
    """

    upper: np.ndarray
    places: np.ndarray


def quantize_gptq(
    values: np.ndarray,
    hessian: np.ndarray,
    format: QuantFormat,
    *,
    exact: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """Finds codes, scales and bases with a small error of the layer's output.

    Args:
        values: float32 [outputs, inputs].
        hessian: X^T X of the layer's inputs, up to a factor: [inputs, inputs].
        exact: bool [outputs, inputs], outliers that are stored exactly.

    Returns:
        As `search_scales`; and float32 [outputs, inputs], the updated weights at their rounding,
        which are the values of outliers.

    Raises:
        ValueError: the Hessian does not fit, or is not positive.
    """
    outputs, inputs = values.shape
    block = format.block
    upper, places = factor_hessian(hessian, inputs, block)
    real, padded = places < inputs, len(places)
    # The smaller R_ii, the less its error costs, as other columns compensate.
    diagonal = np.diag(upper)
    weights = np.where(real, diagonal**2, 0)
    weights = np.stack(
        [block_weights(diagonal_block, block)[0] for diagonal_block in weights.reshape(-1, block)]
    )
    lower = (np.triu(upper, 1) / diagonal).T
    own = lower.reshape(-1, block, padded // block, block)
    settled = np.linalg.inv(own.diagonal(axis1=0, axis2=2).transpose(2, 0, 1) + np.eye(block))
    numbers_of = [lower.reshape(-1, block, padded), settled, weights]
    given = [jnp.asarray(array, jnp.float32) for array in numbers_of]

    def quantize_rows(rows: slice) -> list[np.ndarray]:
        left = values[rows].T[np.where(real, places, 0)]
        kept = None
        if exact is not None:
            kept = (exact[rows].T[np.where(real, places, 0)] & real[:, None]).reshape(
                -1, block, left.shape[1]
            )
        inside = real.reshape(-1, block)
        found = _sweep(left.reshape(-1, block, left.shape[1]), *given, inside, kept, format)
        return [np.asarray(part).T for part in found]

    moved, scale, base = map_row_blocks(quantize_rows, outputs)
    order = np.argsort(places)
    of_block = places[::block] // block
    blocks = np.argsort(of_block)
    moved, scale = moved[:, order], scale[:, blocks]
    bases = None if format.symmetric else base[:, blocks]
    codes = nearest_codes(moved.reshape(outputs, -1, block), scale, bases, format)
    codes.reshape(outputs, padded)[:, inputs:] = 0
    return codes, scale, bases, moved[:, :inputs]


@partial(jax.jit, static_argnums=6)
def _sweep(
    left: Float[Array, "blocks block rows"],
    lower: Float[Array, "blocks block columns"],
    settled: Float[Array, "blocks block block"],
    weights: Float[Array, "blocks block"],
    real: Bool[Array, "blocks block"],
    exact: Bool[Array, "blocks block rows"] | None,
    format: QuantFormat,
) -> tuple[Array, Array, Array]:
    """Returns the weights at their rounding [columns, rows], scales and bases [blocks, rows].

    Args:
        lower: R_ij / R_jj at [j, i], 0 unless i < j.
        settled: maps additions of the errors before a block, with error-free columns in the block,
            to the additions to its columns if the block were not rounded.
        weights: weight of a squared error in the scale search.
        real: columns that are not padding.
    """
    blocks, block, rows = left.shape
    columns = blocks * block

    def one_block(n: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        errors, moved, scales, bases = state
        coupled, given = lower[n], left[n]
        added = matmul(coupled, errors)
        whole = given + matmul(settled[n], added)
        whole = jnp.where(real[n][:, None], whole, whole[:1])  # padding widens no range
        within = lax.dynamic_slice_in_dim(coupled, n * block, block, 1).T  # [from, to]
        kept = jnp.zeros_like(whole, bool) if exact is None else exact[n]
        scale, base = numbers(_without(whole, kept), weights[n][:, None], format)
        step, floor = (number.astype(jnp.float32)[None] for number in (scale, base))

        def error(given: Array, now: Array, kept: Array) -> Array:
            return given - jnp.where(kept, now, dequantized(now, step, floor, format))

        def one_column(i: Array, here: Array) -> Array:
            all_of = (given, here, kept)
            # Computed once, not once for each column it is added to.
            off = lax.optimization_barrier(
                error(*(lax.dynamic_slice_in_dim(part, i, 1) for part in all_of))
            )
            return here + within[i][:, None] * off

        here = lax.fori_loop(0, block, one_column, given + added)
        off = error(given, here, kept)
        errors = lax.dynamic_update_slice_in_dim(errors, off, n * block, 0)
        moved = lax.dynamic_update_slice_in_dim(moved, here, n * block, 0)
        return errors, moved, scales.at[n].set(scale), bases.at[n].set(base)

    zeros, none = jnp.zeros((columns, rows)), jnp.zeros((blocks, rows), jnp.float16)
    _, *found = lax.fori_loop(0, blocks, one_block, (zeros, zeros, none, none))
    moved, scale, base = found
    return moved, scale, base


def _without(block: Array, kept: Array) -> Array:
    """Replaces a block's outliers by the mean of its other weights."""
    count = jnp.sum(~kept, axis=0, dtype=jnp.float32)
    others = jnp.where(kept, 0, block).sum(axis=0) / jnp.maximum(count, 1)
    return jnp.where(kept, others[None], block)


def factor_hessian(hessian: np.ndarray, inputs: int, block: int) -> HessianFactor:
    """Returns the factor R and the order of the columns. Raises `ValueError`."""
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
    H[np.diag_indices(inputs)] += DAMPING * mean
    try:
        R = cholesky(H[::-1, ::-1])[::-1, ::-1]  # from the last column on
    except np.linalg.LinAlgError as error:
        raise ValueError(
            "the inputs' products are not positive definite; calibrate with more text"
        ) from error
    upper = np.eye(len(padded))
    upper[np.ix_(at, at)] = R
    return HessianFactor(upper, places)


ROUNDS = 2


def descend(
    values: np.ndarray,
    hessian: np.ndarray,
    codes: np.ndarray,
    scale: np.ndarray,
    base: np.ndarray | None,
    format: QuantFormat,
    *,
    outliers: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Improves codes, scales and bases by coordinate descent.

    Args:
        values: float32 [outputs, inputs].
        hessian: X^T X of the layer's inputs, up to a factor: [inputs, inputs].
        codes, scale, base: uint8 [outputs, blocks, block], float16 [outputs, blocks] twice.
        outliers: float32 [outputs, inputs], the outliers that are stored exactly, NaN elsewhere.

    Returns:
        Codes, scales and bases in the same form.
    """
    (outputs, inputs), block = values.shape, format.block
    missing = -inputs % block
    H = np.pad(damped_hessian(hessian), (0, missing))
    H[range(inputs, len(H)), range(inputs, len(H))] = 1
    products = jnp.asarray(H.reshape(-1, block, len(H)))

    def descend_rows(rows: slice) -> list[np.ndarray]:
        low, exact = (None if part is None else part[rows] for part in (base, outliers))
        error, free = _start(values[rows], codes[rows], scale[rows], low, format, exact)
        lanes = [_by_block(np.pad(part, ((0, 0), (0, missing))), block) for part in (error, free)]
        q = _by_block(levels_of(codes[rows], format).reshape(len(error), -1), block)
        numbers = (scale[rows].T, None if low is None else low.T)
        found = _descend(products, lanes[0], q, *numbers, lanes[1], format, ROUNDS)
        return [np.asarray(part).T for part in found if part is not None]

    q, *found = map_row_blocks(descend_rows, outputs)
    whole = codes_of(q[:, :inputs], format).astype(np.uint8)
    return split_into_blocks(whole, block), found[0], None if base is None else found[1]


def damped_hessian(hessian: np.ndarray) -> np.ndarray:
    """Damps the Hessian of the loss, float32."""
    H = hessian / np.diag(hessian).mean()
    H[np.diag_indices(len(H))] += DAMPING
    return H.astype(np.float32)


def _start(
    values: np.ndarray,
    codes: np.ndarray,
    scale: np.ndarray,
    base: np.ndarray | None,
    format: QuantFormat,
    exact: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns errors, and a mask: 1 for weights that may change, 0 for others."""
    outputs, inputs = values.shape
    whole = dequantize(codes, scale, base, format).reshape(outputs, -1)[:, :inputs]
    error = whole - values
    if exact is None:
        return error, np.ones_like(error)
    error = np.where(np.isnan(exact), error, exact - values)
    return error, np.isnan(exact).astype(np.float32)


def _by_block(numbers: np.ndarray, block: int) -> np.ndarray:
    """[rows, columns] -> [blocks, block, rows]."""
    return np.ascontiguousarray(numbers.T).reshape(-1, block, len(numbers))


@partial(jax.jit, static_argnums=(6, 7))
def _descend(
    products: Float[Array, "blocks block columns"],
    error: Float[Array, "blocks block rows"],
    codes: Float[Array, "blocks block rows"],
    scale: Float[Array, "blocks rows"],
    base: Float[Array, "blocks rows"] | None,
    free: Float[Array, "blocks block rows"],
    format: QuantFormat,
    rounds: int,
) -> tuple[Array, Array, Array | None]:
    """Returns levels [columns, rows], scales and bases."""
    blocks, block, rows = error.shape

    def descend_block(turn: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        n = turn % blocks
        error, codes, scale, base = state
        slope = matmul(products[n], error.reshape(-1, rows))
        own = lax.dynamic_slice_in_dim(products[n], n * block, block, 1)
        here = _Block(codes[n], scale[n], base[n], error[n], slope, own, free[n], format)
        here.fit()
        here.round()
        return (
            error.at[n].set(here.error),
            codes.at[n].set(here.codes),
            scale.at[n].set(here.scale),
            base.at[n].set(here.base),
        )

    low = jnp.zeros_like(scale) if base is None else base
    state = (error, codes, scale, low)
    _, codes, scale, low = lax.fori_loop(0, rounds * blocks, descend_block, state)
    return codes.reshape(-1, rows), scale, None if base is None else low


@dataclass
class _Block:
    """State of a block of each row during descent.

    Attributes:
        codes: the levels of codes, float32 [columns, rows].
        scale, base: float16 [rows]; no base: 0.
        error, slope: [columns, rows], the weights' errors, and half the loss's gradient.
        H: [columns, columns].
        free: [columns, rows], 1 for weights that may change.
    """

    codes: Array
    scale: Array
    base: Array
    error: Array
    slope: Array
    H: Array
    free: Array
    format: QuantFormat

    def fit(self) -> None:
        """Fits scale and base to the codes; keeps the old ones if rounding to fp16 loses more."""
        q, free = self.codes * self.free, self.free
        Hq = matmul(self.H, q)
        qq, down = _dot(Hq, q), -_dot(self.slope, q)
        more, lift = _ratio(down, qq, qq > 0), jnp.zeros_like(down)
        if not self.format.symmetric:
            Hf = matmul(self.H, free)
            qf, ff, flat = _dot(Hq, free), _dot(Hf, free), -_dot(self.slope, free)
            det = qq * ff - qf * qf
            solvable = det > 1e-6 * qq * ff
            more = _ratio(down * ff - flat * qf, det, solvable)
            lift = _ratio(qq * flat - qf * down, det, solvable)
        before = self.scale.astype(jnp.float32), self.base.astype(jnp.float32)
        scale, base = to_fp16(before[0] + more, jnp), to_fp16(before[1] + lift, jnp)
        wider, raised = scale.astype(jnp.float32) - before[0], base.astype(jnp.float32) - before[1]
        change = q * wider[None] + free * raised[None]
        bend = matmul(self.H, change)
        better = 2 * _dot(self.slope, change) + _dot(bend, change) < 0
        self.error += jnp.where(better[None], change, 0)
        self.slope += jnp.where(better[None], bend, 0)
        self.scale = jnp.where(better, scale, self.scale)
        self.base = jnp.where(better, base, self.base)

    def round(self) -> None:
        """Rounds each code to the nearest optimum, one column after the other."""
        step = self.scale.astype(jnp.float32)
        inverse = _ratio(jnp.ones_like(step), step, step != 0)

        def column(j: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            slope, codes = state
            h, before = self.H[j], codes[j]
            q = nearest_levels(before - slope[j] / h[j] * inverse, self.format, jnp)
            # Computed once, not once for each column whose gradient it changes.
            q = lax.optimization_barrier(q)
            change = (q - before) * step * self.free[j]
            return slope + h[:, None] * change[None], codes.at[j].set(q)

        codes = self.codes
        _, self.codes = lax.fori_loop(0, len(self.H), column, (self.slope, codes))
        self.error += (self.codes - codes) * step[None] * self.free


def _dot(a: Array, b: Array) -> Array:
    """Computes column-wise dot products."""
    return jnp.sum(a * b, axis=0)


def _ratio(above: Array, below: Array, where: Array) -> Array:
    """Divides; 0 where masked."""
    return jnp.where(where, above / jnp.where(where, below, 1), 0)

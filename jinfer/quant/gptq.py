"""GPTQ: quantization with error feedback (method `quantize_gptq`, arXiv 2210.17323).

The loss is that of a layer's output on its inputs X: with H = X^T X (the Hessian) it is sum_rows (w
- w')^T H (w - w'). Columns are rounded one after the other. With H = R R^T, R upper triangular, the
loss is the sum of all squares of (w - w') R, whose column j only depends on the errors of columns
up to j; so the best value of column j, given the roundings before it, is what GPTQ computes with
the inverse of R:

    w_j + sum_{i < j} (w_i - w'_i) R_ij / R_jj

A block's scale and base are searched when its first column is reached, on the weights as updated by
then. Blocks are processed by falling importance (act-order), and so are the columns within each:
the order is free, because block numbers belong to inputs in whatever order they are processed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jinfer.matmul_precision import matmul
from jinfer.modelspec.quant_format import QuantFormat
from jinfer.quant.cholesky import cholesky
from jinfer.quant.round_to_nearest import nearest_codes
from jinfer.quant.row_blocks import map_row_blocks
from jinfer.quant.scale_search import block_weights, dequantized, numbers

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

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
    damping: float = DAMPING,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """Codes, scales and bases with a small error of the layer's output.

    Args:
        values: float32 [outputs, inputs].
        hessian: X^T X of the layer's inputs, up to a factor: [inputs, inputs].
        exact: bool [outputs, inputs], outliers that are stored exactly beside the codes.

    Returns:
        As `search_scales`; and float32 [outputs, inputs], the updated weights when they were
        rounded, which are the values of the outliers.

    Raises:
        ValueError: the Hessian does not fit, or is not positive.
    """
    outputs, inputs = values.shape
    block = format.block
    upper, places = factor_hessian(hessian, inputs, block, damping)
    real, padded = places < inputs, len(places)
    # The smaller R_ii, the less its error costs, as other columns compensate.
    diagonal = np.diag(upper)
    weights = np.where(real, diagonal**2, 0)
    weights = np.stack([block_weights(each, block)[0] for each in weights.reshape(-1, block)])
    lower = (np.triu(upper, 1) / diagonal).T
    own = lower.reshape(-1, block, padded // block, block)
    settled = np.linalg.inv(own.diagonal(axis1=0, axis2=2).transpose(2, 0, 1) + np.eye(block))
    numbers_of = [lower.reshape(-1, block, padded), settled, weights]
    given = [jnp.asarray(each, jnp.float32) for each in numbers_of]

    def some(rows: slice) -> list[np.ndarray]:
        left = values[rows].T[np.where(real, places, 0)]
        kept = None
        if exact is not None:
            kept = (exact[rows].T[np.where(real, places, 0)] & real[:, None]).reshape(
                -1, block, left.shape[1]
            )
        inside = real.reshape(-1, block)
        found = _sweep(left.reshape(-1, block, left.shape[1]), *given, inside, kept, format)
        return [np.asarray(each).T for each in found]

    moved, scale, base = map_row_blocks(some, outputs)
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
    """The weights when they were rounded [columns, rows], scales and bases [blocks, rows].

    Args:
        lower: R_ij / R_jj at [j, i], 0 unless i < j.
        settled: what the errors before a block add to each of its columns, were the block not
            rounded, of what they add if the columns before it in the block have no error.
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
        step, floor = (each.astype(jnp.float32)[None] for each in (scale, base))

        def error(given: Array, now: Array, kept: Array) -> Array:
            return given - jnp.where(kept, now, dequantized(now, step, floor, format))

        def one_column(i: Array, here: Array) -> Array:
            all_of = (given, here, kept)
            # Computed once, not once for each column it is added to.
            off = lax.optimization_barrier(
                error(*(lax.dynamic_slice_in_dim(each, i, 1) for each in all_of))
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
    """A block with its outliers replaced by the mean of the others."""
    count = jnp.sum(~kept, axis=0, dtype=jnp.float32)
    others = jnp.where(kept, 0, block).sum(axis=0) / jnp.maximum(count, 1)
    return jnp.where(kept, others[None], block)


def factor_hessian(hessian: np.ndarray, inputs: int, block: int, damping: float) -> HessianFactor:
    """The factor R and the order of the columns. Raises `ValueError`."""
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
        R = cholesky(H[::-1, ::-1])[::-1, ::-1]  # from the last column on
    except np.linalg.LinAlgError as error:
        raise ValueError(
            "the inputs' products are not positive definite; raise the damping"
        ) from error
    upper = np.eye(len(padded))
    upper[np.ix_(at, at)] = R
    return HessianFactor(upper, places)

"""Coordinate descent after GPTQ: codes and scales improved one at a time, all others fixed.

GPTQ rounds each weight once, before it knows the later roundings. With H = X^T X of the layer's
inputs and E the error of the weights, the loss is tr(E H E^T); with all others fixed the best value
of a weight, or the best scale and base of a block, has a closed form: coordinate descent (arXiv
2309.01885).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jinfer.matmul_precision import matmul
from jinfer.modelspec.quant_format import QuantFormat
from jinfer.quant.levels import codes_of, levels_of, nearest_levels
from jinfer.quant.round_to_nearest import dequantize, split_into_blocks, to_fp16
from jinfer.quant.row_blocks import map_row_blocks

if TYPE_CHECKING:
    from jaxtyping import Float

ROUNDS = 2


def descend(
    values: np.ndarray,
    hessian: np.ndarray,
    codes: np.ndarray,
    scale: np.ndarray,
    base: np.ndarray | None,
    format: QuantFormat,
    *,
    damping: float,
    outliers: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Codes, scales and bases of smaller loss.

    Args:
        values: float32 [outputs, inputs].
        hessian: X^T X of the layer's inputs, up to a factor: [inputs, inputs].
        codes, scale, base: uint8 [outputs, blocks, block], float16 [outputs, blocks] twice.
        damping: as for `quantize_gptq`.
        outliers: float32 [outputs, inputs], the outliers stored exactly beside the codes, NaN
            elsewhere.

    Returns:
        Codes, scales and bases in the same form.
    """
    (outputs, inputs), block = values.shape, format.block
    missing = -inputs % block
    H = np.pad(damped_hessian(hessian, damping), (0, missing))
    H[range(inputs, len(H)), range(inputs, len(H))] = 1
    products = jnp.asarray(H.reshape(-1, block, len(H)))

    def some(rows: slice) -> list[np.ndarray]:
        low, exact = (None if each is None else each[rows] for each in (base, outliers))
        error, free = _start(values[rows], codes[rows], scale[rows], low, format, exact)
        lanes = [_lanes(np.pad(each, ((0, 0), (0, missing))), block) for each in (error, free)]
        q = _lanes(levels_of(codes[rows], format).reshape(len(error), -1), block)
        numbers = (scale[rows].T, None if low is None else low.T)
        found = _descend(products, lanes[0], q, *numbers, lanes[1], format, ROUNDS)
        return [np.asarray(each).T for each in found if each is not None]

    q, *found = map_row_blocks(some, outputs)
    whole = codes_of(q[:, :inputs], format).astype(np.uint8)
    return split_into_blocks(whole, block), found[0], None if base is None else found[1]


def damped_hessian(hessian: np.ndarray, damping: float) -> np.ndarray:
    """The damped Hessian of the loss, float32."""
    H = hessian / np.diag(hessian).mean()
    H[np.diag_indices(len(H))] += damping
    return H.astype(np.float32)


def _start(
    values: np.ndarray,
    codes: np.ndarray,
    scale: np.ndarray,
    base: np.ndarray | None,
    format: QuantFormat,
    exact: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Errors, and 1 for weights that may change, 0 for others."""
    outputs, inputs = values.shape
    whole = dequantize(codes, scale, base, format).reshape(outputs, -1)[:, :inputs]
    error = whole - values
    if exact is None:
        return error, np.ones_like(error)
    error = np.where(np.isnan(exact), error, exact - values)
    return error, np.isnan(exact).astype(np.float32)


def _lanes(numbers: np.ndarray, block: int) -> np.ndarray:
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
    """Levels [columns, rows], scales and bases."""
    blocks, block, rows = error.shape

    def one(turn: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
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
    _, codes, scale, low = lax.fori_loop(0, rounds * blocks, one, state)
    return codes.reshape(-1, rows), scale, None if base is None else low


@dataclass
class _Block:
    """A block of each row, during descent.

    Attributes:
        codes: the levels that codes stand for, float32 [columns, rows].
        scale, base: float16 [rows]; no base: 0.
        error, slope: [columns, rows], of the weights, and half the loss's gradient.
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
        """The best scale and base for the codes, if they are better as stored in fp16."""
        q, free = self.codes * self.free, self.free
        Hq = matmul(self.H, q)
        qq, down = _dot(Hq, q), -_dot(self.slope, q)
        more, lift = _ratio(down, qq, qq > 0), jnp.zeros_like(down)
        if not self.format.symmetric:
            Hf = matmul(self.H, free)
            qf, ff, flat = _dot(Hq, free), _dot(Hf, free), -_dot(self.slope, free)
            det = qq * ff - qf * qf
            some = det > 1e-6 * qq * ff
            more = _ratio(down * ff - flat * qf, det, some)
            lift = _ratio(qq * flat - qf * down, det, some)
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
    """Column-wise dot product."""
    return jnp.sum(a * b, axis=0)


def _ratio(above: Array, below: Array, where: Array) -> Array:
    """The ratio, 0 where masked."""
    return jnp.where(where, above / jnp.where(where, below, 1), 0)

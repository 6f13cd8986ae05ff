"""GPTQ and coordinate descent in NumPy, number by number from their definitions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jinfer.quant.gptq import ROUNDS, _start, _without, damped_hessian, factor_hessian
from jinfer.quant.round_to_nearest import dequantize, nearest_codes, split_into_blocks
from jinfer.quant.scale_search import block_weights, numbers
from jinfer.quant_format import QuantFormat


def quantize_gptq_reference(
    values: np.ndarray,
    hessian: np.ndarray,
    format: QuantFormat,
    *,
    exact: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """`quantize_gptq`, column by column with the inverse of R: errors are propagated at once."""
    outputs, inputs = values.shape
    block = format.block
    factored, places = factor_hessian(hessian, inputs, block)
    upper = np.linalg.inv(factored).astype(np.float32)
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
            error = (now - dequantize(q, step, low, format))[:, 0, 0]
            error[kept[:, column]] = 0
            after = places[begin + i + 1 :]
            coupling = upper[begin + i, begin + i + 1 :] / upper[begin + i, begin + i]
            real = after < inputs
            moved[:, after[real]] -= error[:, None] * coupling[real]
    bases = None if format.symmetric else base
    whole = np.pad(moved, ((0, 0), (0, -inputs % block)))
    codes = nearest_codes(split_into_blocks(whole, block), scale, bases, format)
    codes.reshape(outputs, -1)[:, inputs:] = 0
    return codes, scale, bases, moved


def descend_reference(
    values: np.ndarray,
    hessian: np.ndarray,
    codes: np.ndarray,
    scale: np.ndarray,
    base: np.ndarray | None,
    format: QuantFormat,
    *,
    outliers: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """`descend`, each number computed from the definition of the loss."""
    outputs, inputs = values.shape
    H = damped_hessian(hessian).astype(np.float64)
    error, free = _start(values, codes, scale, base, format, outliers)
    error, free = error.astype(np.float64), free.astype(np.float64)
    zero = format.zero if base is None else 0
    q = codes.reshape(outputs, -1)[:, :inputs].astype(np.float64) - zero
    scale = scale.copy()
    low = np.zeros_like(scale) if base is None else base.copy()
    for begin in [*range(0, inputs, format.block)] * ROUNDS:
        n, part = begin // format.block, slice(begin, begin + format.block)
        for row in range(outputs):
            ways = [q[row, part] * free[row, part]]
            ways += [] if base is None else [free[row, part]]
            basis = np.zeros((len(ways), inputs))
            basis[:, part] = ways
            normal = basis @ H @ basis.T
            if np.linalg.det(normal) <= 1e-6 * np.prod(np.diag(normal)):
                continue
            more = np.append(np.linalg.solve(normal, -basis @ H @ error[row]), 0)
            numbers = np.array([scale[row, n], low[row, n]], np.float64)
            stored = (numbers + more[:2]).astype(np.float16)
            change = (stored - numbers)[: len(ways)] @ basis
            if (2 * error[row] + change) @ H @ change < 0:
                error[row] += change
                scale[row, n], low[row, n] = stored
        step = scale[:, n].astype(np.float64)
        inverse = np.divide(1, step, out=np.zeros_like(step), where=step != 0)
        for j in range(begin, min(begin + format.block, inputs)):
            best = q[:, j] - error @ H[j] / H[j, j] * inverse
            nearest = np.clip(np.rint(best), -zero, format.levels - 1 - zero)
            error[:, j] += (nearest - q[:, j]) * step * free[:, j]
            q[:, j] = nearest
    found = split_into_blocks((q + zero).astype(np.uint8), format.block)
    return found, scale, None if base is None else low

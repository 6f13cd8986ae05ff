"""Quantize: numbers to codes by rounding to nearest (RTN), scale search (MSE), or GPTQ."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np

from jinfer.quant.f16_as_int import quantize_f16
from jinfer.quant.quantized_tensor import QuantizedTensor, from_codes
from jinfer.quant.round_to_nearest import (
    dequantize,
    nearest_codes,
    nearest_numbers,
    split_into_blocks,
)
from jinfer.quant.sparse_matrix import OutlierTensor, outlier_count, to_sparse
from jinfer.quant_format import F16_AS_INT, QuantFormat

_MOST = 8  # outliers per block
_CHUNK = 1 << 20  # weights at a time


def find_outliers(
    values: np.ndarray, format: QuantFormat, count: int, importance: np.ndarray | None = None
) -> np.ndarray:
    """Selects at most `count` outliers: bool [outputs, inputs].

    Args:
        values: float32 [outputs, inputs].
        importance: of each input (imatrix): [inputs].
    """
    chosen = np.zeros(values.shape, bool)
    if count == 0:
        return chosen
    inputs, block = values.shape[-1], format.block
    # One importance per block, because a removal improves the whole block.
    weights = np.ones(-(-inputs // block), np.float32)
    if importance is not None:
        filled = split_into_blocks(importance.astype(np.float32), block)
        weights = filled.mean(axis=1) / max(float(filled.mean()), 1e-30)
    height = max(1, _CHUNK // inputs)
    slopes = np.concatenate(
        [
            _slopes(split_into_blocks(values[begin : begin + height], block), format)
            for begin in range(0, len(values), height)
        ]
    )
    slopes *= weights[None, :, None]
    flat = slopes.reshape(-1)
    count = min(count, flat.size)
    best = np.argpartition(flat, flat.size - count)[flat.size - count :]
    best = best[flat[best] > 0]
    rows, parts, _ = np.unravel_index(best, slopes.shape)
    counts = np.zeros(slopes.shape[:2], np.int64)
    np.add.at(counts, (rows, parts), 1)
    blocks = split_into_blocks(values, block)
    for k in range(1, int(counts.max(initial=0)) + 1):
        rows, parts = np.nonzero(counts == k)
        columns = parts[:, None] * block + _extremes(blocks[rows, parts], k, format)
        real = columns < inputs
        chosen[np.broadcast_to(rows[:, None], real.shape)[real], columns[real]] = True
    return chosen


def without_outliers(values: np.ndarray, outliers: np.ndarray, block: int) -> np.ndarray:
    """Replaces outliers by the mean of their block's other weights."""
    if not outliers.any():
        return values
    kept, parts = ~split_into_blocks(outliers, block), split_into_blocks(values, block)
    mean = (parts * kept).sum(axis=-1) / np.maximum(kept.sum(axis=-1), 1)
    filled = np.where(kept, parts, mean[..., None].astype(np.float32))
    return filled.reshape(len(values), -1)[:, : values.shape[-1]]


def _slopes(blocks: np.ndarray, format: QuantFormat) -> np.ndarray:
    """Returns the gain of removing the k-th weight of each block: [..., blocks, k], falling."""
    max_outliers = min(_MOST, format.block // 2)
    if format.symmetric:
        magnitudes = np.sort(np.abs(blocks), axis=-1)[..., ::-1]
        left = magnitudes[..., : max_outliers + 1] * np.float32(2)
    else:
        ordered = np.sort(blocks, axis=-1)
        widths = [_ranges(ordered, k).min(axis=-1) for k in range(max_outliers + 1)]
        left = np.stack(widths, axis=-1)
    gain = left[..., :1] ** 2 - left**2
    slopes = np.empty((*gain.shape[:-1], max_outliers), np.float32)
    for k in range(1, max_outliers + 1):
        steepest = [
            np.max(
                [(gain[..., b] - gain[..., a]) / (b - a) for b in range(k, max_outliers + 1)],
                axis=0,
            )
            for a in range(k)
        ]
        slopes[..., k - 1] = np.min(steepest, axis=0)
    return slopes


def _ranges(ordered: np.ndarray, k: int) -> np.ndarray:
    """Returns the range without the l lowest and the k - l highest weights: [..., l], l <= k."""
    lowest = np.arange(k + 1)
    return ordered[..., lowest - k - 1] - ordered[..., lowest]


def _extremes(blocks: np.ndarray, k: int, format: QuantFormat) -> np.ndarray:
    """Finds the k weights whose removal minimizes each block's range: [n, block] -> [n, k]."""
    if format.symmetric:
        return np.argsort(-np.abs(blocks), axis=-1, kind="stable")[:, :k]
    order = np.argsort(blocks, axis=-1, kind="stable")
    lowest = _ranges(np.take_along_axis(blocks, order, axis=-1), k).argmin(axis=-1)
    # The k - l highest and the l lowest are adjacent in cyclic order.
    indices = lowest[:, None] - k + np.arange(k)
    return np.take_along_axis(order, indices % blocks.shape[-1], axis=-1)


# "rtn" rounds to nearest; "mse" minimizes each block's squared error, weighted by `importance` if
# given (imatrix); "gptq" minimizes the error of the layer's output, from products of its inputs.
Method = Literal["rtn", "mse", "gptq"]


def quantize(
    weight: Any,
    format: QuantFormat,
    *,
    method: Method = "rtn",
    importance: Any | None = None,
    hessian: Any | None = None,
    columns: int | None = None,
) -> QuantizedTensor:
    """Quantizes a matrix, or a stack of them.

    Args:
        weight: [*stack, outputs, inputs].
        method: how codes, scales and bases are chosen.
        importance: weight of each input's squared error, for "mse": the mean square of the
            layer's inputs (imatrix). [inputs], or one for each matrix of the stack.
        hessian: X^T X of the layer's inputs, for "gptq": [inputs, inputs], or one for each matrix
            of the stack.
        columns: see `from_codes`.

    Returns:
        A tensor of NumPy arrays.

    Raises:
        ValueError: an unsupported format or method.
    """
    values = _values(weight, format, method, hessian)
    if format == F16_AS_INT:  # scales follow from the values
        blocks = values.reshape(*values.shape[:-1], -1, format.block)
        integers, scales = quantize_f16(blocks)
        codes = (integers.astype(np.int32) + format.zero).astype(np.uint16)
        return from_codes(codes.reshape(values.shape), scales[..., None], format, columns=columns)
    parts = []
    for index in np.ndindex(values.shape[:-2]):
        importances, products = _of(importance, index, 1), _of(hessian, index, 2)
        parts.append(_choose(values[index], format, method, importances, products, None))
    return _packed(parts, values.shape, format, columns)


def quantize_with_outliers(
    weight: Any,
    format: QuantFormat,
    share: float,
    *,
    method: Method = "rtn",
    importance: Any | None = None,
    hessian: Any | None = None,
    columns: int | None = None,
) -> OutlierTensor:
    """Like `quantize`, with some weights (outliers) stored exactly in a sparse matrix.

    Args:
        share: max share of each matrix's weights that are outliers.
    """
    values = _values(weight, format, method, hessian)
    stack = values.shape[:-2]
    count = outlier_count(values.shape, share)
    parts, sparse = [], []
    for index in np.ndindex(stack):
        importances, products = _of(importance, index, 1), _of(hessian, index, 2)
        if importances is None and products is not None:
            importances = np.diag(products)
        matrix = values[index]
        kept = find_outliers(matrix, format, count, importances)
        others = matrix if method == "gptq" else without_outliers(matrix, kept, format.block)
        part = _choose(others, format, method, importances, products, kept)
        parts.append(part)
        blocks = dequantize(part.codes, part.scale, part.base, format)
        missing = blocks.reshape(len(matrix), -1)[:, : matrix.shape[1]]
        target = matrix if part.moved is None else part.moved
        sparse.append(to_sparse(target - missing, kept, count))
    outliers = jax.tree.map(lambda *arrays: np.stack(arrays).reshape(*stack, count), *sparse)
    return OutlierTensor(_packed(parts, values.shape, format, columns), outliers)


class _QuantizedMatrix(NamedTuple):
    """Codes and block numbers of a matrix [outputs, inputs].

    Attributes:
        codes: uint8 [outputs, blocks, block].
        scale, base: float16 [outputs, blocks].
        moved: the weights that the codes approximate, if they are not the original ones.
    """

    codes: np.ndarray
    scale: np.ndarray
    base: np.ndarray | None
    moved: np.ndarray | None = None


def _choose(
    values: np.ndarray,
    format: QuantFormat,
    method: Method,
    importance: np.ndarray | None,
    hessian: np.ndarray | None,
    exact: np.ndarray | None,
) -> _QuantizedMatrix:
    match method:
        case "rtn":
            blocks = split_into_blocks(values, format.block)
            numbers = nearest_numbers(blocks, format)
            return _QuantizedMatrix(nearest_codes(blocks, *numbers, format), *numbers)
        case "mse":
            # Imported lazily: it compiles programs, which cached weights do not need.
            from jinfer.quant.scale_search import search_scales

            return _QuantizedMatrix(*search_scales(values, format, importance))
        case "gptq":
            from jinfer.quant.gptq import descend, quantize_gptq

            assert hessian is not None
            codes, scale, base, moved = quantize_gptq(values, hessian, format, exact=exact)
            kept = None if exact is None else np.where(exact, moved, np.float32(np.nan))
            start = (values, hessian, codes, scale, base, format)
            better = descend(*start, outliers=kept)
            return _QuantizedMatrix(*better, moved)


def _values(weight: Any, format: QuantFormat, method: Method, hessian: Any | None) -> np.ndarray:
    """Converts the matrix to float32. Raises `ValueError`."""
    if not format.can_be_requested:
        raise ValueError(
            f"{format} cannot be quantized to: its blocks are only read from files; "
            "choose a plain format such as q4"
        )
    if method not in get_args(Method):
        raise ValueError(f"no method {method!r}; methods are {', '.join(get_args(Method))}")
    if method == "gptq" and hessian is None:
        raise ValueError('method "gptq" needs the products of the layer\'s inputs; calibrate')
    return np.asarray(weight, np.float32)


def _of(statistics: Any | None, index: tuple[int, ...], axes: int) -> np.ndarray | None:
    """Returns the importance or Hessian of one matrix of a stack, shared or its own."""
    if statistics is None:
        return None
    array = np.asarray(statistics)
    return array if array.ndim == axes else array[index]


def _packed(
    parts: list[_QuantizedMatrix], shape: tuple[int, ...], format: QuantFormat, columns: int | None
) -> QuantizedTensor:
    stack = shape[:-2]
    single = len(parts) == 1  # the usual case, and the largest matrices: no copy
    codes = parts[0].codes[None] if single else np.stack([part.codes for part in parts])
    codes = codes.reshape(*stack, shape[-2], -1)[..., : shape[-1]]
    numbers = [
        np.stack([part.scale] if part.base is None else [part.scale, part.base], axis=-1)
        for part in parts
    ]
    scales = np.stack(numbers).reshape(*stack, shape[-2], -1, format.numbers)
    return from_codes(codes, scales, format, columns=columns)

"""Tensor parallelism: slices each device's shard from a parameter, without requantizing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jinfer.loader.weights.storage_plan import columns_here
from jinfer.parallel.sharding_rules import AxisSharding, ShardingError
from jinfer.quant.quantized_tensor import (
    SUPER,
    QuantizedTensor,
    abstract,
    from_codes,
    to_codes,
)
from jinfer.quant.reordered_tensor import ReorderedTensor, abstract_reordered
from jinfer.quant.scaled_tensor import ScaledTensor, abstract_scaled
from jinfer.quant.sparse_matrix import OutlierTensor, SparseTensor, abstract_outliers

type ParameterSharding = Mapping[
    int, AxisSharding
]  # axis of a parameter -> how it is divided, in elements


def abstract_shard(parameter: Any, sharding: ParameterSharding) -> Any:
    """The shape and dtype of one device's shard, packed for the kind of device in use."""
    shape = tuple(
        sharding[axis].size if axis in sharding else size
        for axis, size in enumerate(parameter.shape)
    )
    if isinstance(parameter, OutlierTensor):
        rounded = abstract_shard(parameter.rounded, sharding)
        count = int(parameter.outliers.values.shape[-1])
        return abstract_outliers(rounded, count)
    if isinstance(parameter, ReorderedTensor):
        return abstract_reordered(abstract_shard(parameter.rounded, sharding))
    if isinstance(parameter, ScaledTensor):
        return abstract_scaled(shape, -(-shape[-1] // parameter.block))
    if isinstance(parameter, QuantizedTensor):
        quantized = abstract(shape, parameter.format, columns_here(parameter.format))
        return replace(quantized, activations=parameter.activations)
    return jax.ShapeDtypeStruct(shape, parameter.dtype)


def check_quant_blocks(parameter: Any, sharding: ParameterSharding) -> None:
    """Raises `ShardingError` where a quantization block would be split between devices."""
    unit, share = quant_block(parameter), sharding.get(len(parameter.shape) - 1)
    if share is not None and isinstance(parameter, ReorderedTensor) and share.size < share.total:
        raise ShardingError(
            "its inputs are reordered (desc_act) and cannot be divided: use fewer tensor-parallel "
            'devices, or quantization.weights = "q4"'
        )
    if share is None or unit == 1:
        return
    for start, count in zip(share.starts, share.counts, strict=True):
        # Shards smaller than a block may share one.
        inside = start // unit == (start + count - 1) // unit
        if count and start % unit and not inside:
            raise ShardingError(
                f"parts of {share.size} of its {share.total} columns do not end where its "
                f"quantized blocks of {unit} do"
            )


def quant_block(parameter: Any) -> int:
    """Columns of a quantization block (a superblock where there are two levels of scales).

    1 for a parameter that is not quantized.
    """
    if isinstance(parameter, OutlierTensor | ReorderedTensor):
        return quant_block(parameter.rounded)
    if isinstance(parameter, ScaledTensor):
        return parameter.block if parameter.scales.shape[-1] > 1 else 1
    if not isinstance(parameter, QuantizedTensor):
        return 1
    return SUPER if parameter.format.two_level else parameter.format.block


def slice_shard(values: Any, sharding: ParameterSharding, device: int) -> Any:
    """One device's shard of a parameter, as NumPy arrays."""
    if not sharding:
        return values
    if isinstance(values, OutlierTensor):
        return OutlierTensor(
            slice_shard(values.rounded, sharding, device),
            _slice_sparse(values.outliers, sharding, device),
        )
    if isinstance(values, ReorderedTensor):
        return replace(values, rounded=slice_shard(values.rounded, sharding, device))
    if isinstance(values, ScaledTensor):
        return _slice_scaled(values, sharding, device)
    if isinstance(values, QuantizedTensor):
        return _slice_quantized(values, sharding, device)
    for axis, share in sharding.items():
        values = _slice_axis(values, axis, share, device)
    return _copied(values)


def _copied(values: np.ndarray) -> np.ndarray:
    """A copy: a CPU device may use a view in place, which would keep the whole array alive."""
    return np.array(values, order="C")


def _slice_axis(values: np.ndarray, axis: int, sharding: AxisSharding, device: int) -> np.ndarray:
    """A shard along an axis, padded with zeros."""
    begin, count = sharding.starts[device], sharding.counts[device]
    shard = values[(slice(None),) * axis + (slice(begin, begin + count),)]
    if count == sharding.size:
        return shard
    padding = [(0, 0)] * values.ndim
    padding[axis] = (0, sharding.size - count)
    return np.pad(shard, padding)


def _slice_scaled(tensor: ScaledTensor, sharding: ParameterSharding, device: int) -> ScaledTensor:
    columns, of_rows = tensor.ndim - 1, dict(sharding)
    share = of_rows.pop(columns, None)
    numbers = slice_shard(np.asarray(tensor.numbers), sharding, device)
    scales = slice_shard(np.asarray(tensor.scales), of_rows, device)
    if share is not None and scales.shape[-1] > 1:
        scales = _slice_scales(scales[..., None], tensor.block, share, device)[..., 0]
    return ScaledTensor(numbers, _copied(scales))


def _slice_quantized(
    tensor: QuantizedTensor, sharding: ParameterSharding, device: int
) -> QuantizedTensor:
    stack = len(tensor.stack)
    rows, columns = sharding.get(stack), sharding.get(stack + 1)
    if (whole_tiles := _slice_tiles(tensor, rows, columns, device)) is not None:
        return whole_tiles
    codes, scales, steps = to_codes(tensor)
    codes = codes[..., : tensor.inputs]
    if rows is not None:
        codes, scales = (_slice_axis(each, stack, rows, device) for each in (codes, scales))
        steps = None if steps is None else _slice_axis(steps, stack, rows, device)
    if columns is not None:
        codes = _slice_axis(codes, stack + 1, columns, device)
        scales = _slice_scales(scales, tensor.format.block, columns, device)
        steps = None if steps is None else _slice_scales(steps, SUPER, columns, device)
    shard = from_codes(
        np.ascontiguousarray(codes), scales, tensor.format, steps=steps, columns=tensor.columns
    )
    return replace(shard, activations=tensor.activations)


def _slice_scales(
    scales: np.ndarray, block: int, sharding: AxisSharding, device: int
) -> np.ndarray:
    """The block scales [..., rows, blocks, n] of a shard of columns; zeros for padding."""
    begin, count = sharding.starts[device], sharding.counts[device]
    first, last = begin // block, -(-(begin + count) // block)
    shard = scales[..., first:last, :] if count else scales[..., :0, :]
    missing = -(-sharding.size // block) - shard.shape[-2]
    return np.pad(shard, [(0, 0)] * (shard.ndim - 2) + [(0, missing), (0, 0)])


def _slice_tiles(
    tensor: QuantizedTensor, rows: AxisSharding | None, columns: AxisSharding | None, device: int
) -> QuantizedTensor | None:
    """A shard made of whole tiles and superblocks, sliced without repacking; else None."""
    stack = len(tensor.stack)
    superblock = 32 * tensor.format.per_code * tensor.columns
    units = tensor.rows, max(superblock, tensor.format.block)
    shape = [tensor.outputs, tensor.inputs]
    ends = [(0, tensor.words.shape[stack] * tensor.rows), (0, tensor.padded_inputs)]
    for axis, (share, unit) in enumerate(zip((rows, columns), units, strict=True)):
        if share is None:
            continue
        begin, count = share.starts[device], share.counts[device]
        if begin % unit or share.size % unit or count != share.size:
            return None
        ends[axis], shape[axis] = (begin, begin + count), share.size

    def sliced(array: Any) -> np.ndarray:
        sizes = tensor.rows, tensor.padded_inputs // array.shape[stack + 1]  # weights per entry
        slices = (slice(a // size, b // size) for (a, b), size in zip(ends, sizes, strict=True))
        return _copied(np.asarray(array)[(slice(None),) * stack + tuple(slices)])

    words, scales, steps = (
        None if array is None else sliced(array)
        for array in (tensor.words, tensor.scales, tensor.steps)
    )
    return QuantizedTensor(
        words, scales, steps, tensor.format, shape[0], shape[1], tensor.activations
    )


def _slice_sparse(sparse: SparseTensor, sharding: ParameterSharding, device: int) -> SparseTensor:
    """The entries of a sparse matrix in a device's shard, with capacity for all of them."""
    stack = sparse.values.shape[:-1]
    sizes = [sparse.outputs, sparse.inputs]
    inside = np.asarray(sparse.rows) < sparse.outputs
    indices = [np.asarray(sparse.rows), np.asarray(sparse.columns)]
    for axis in range(2):
        if (share := sharding.get(len(stack) + axis)) is None:
            continue
        indices[axis] = indices[axis] - share.starts[device]
        inside &= (indices[axis] >= 0) & (indices[axis] < share.counts[device])
        sizes[axis] = share.size
    values = np.asarray(sparse.values)
    order = np.argsort(~inside, axis=-1, kind="stable")
    used = np.take_along_axis(inside, order, axis=-1)

    def compacted(array: np.ndarray, empty: int) -> np.ndarray:
        ordered = np.take_along_axis(array, order, axis=-1)
        return np.where(used, ordered, np.asarray(empty, array.dtype)).astype(array.dtype)

    return SparseTensor(
        compacted(indices[0].astype(np.int32), sizes[0]),
        compacted(indices[1].astype(np.int32), 0),
        compacted(values, 0),
        *sizes,
    )

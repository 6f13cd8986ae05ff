"""Parameters cut into the parts of several devices, with the codes that the whole ones have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jinfer.parallel.shard_sizes import Share, ShareError, of_elements
from jinfer.quant.quantized_tensor import (
    SUPER,
    QuantizedTensor,
    abstract,
    from_codes,
    to_codes,
    with_columns,
)
from jinfer.quant.sparse_matrix import OutlierTensor, SparseTensor, abstract_outliers
from jinfer.weights.storage_plan import columns_here

type Shares = Mapping[int, Share]  # axis of a parameter -> who has what of it, in elements


def shares_of(
    shape: Sequence[int], axes: Sequence[str], shares: Mapping[str, Share]
) -> dict[int, Share]:
    """How a parameter's axes are divided, by their logical names."""
    return {
        axis: of_elements(shares[name], shape[axis])
        for axis, name in enumerate(axes)
        if name in shares
    }


def abstract_part(parameter: Any, shares: Shares) -> Any:
    """The shapes and types of a device's part, as that kind of device wants it."""
    shape = tuple(
        shares[axis].size if axis in shares else size for axis, size in enumerate(parameter.shape)
    )
    if isinstance(parameter, OutlierTensor):
        kept = abstract_part(parameter.rounded, shares)
        count = int(parameter.outliers.values.shape[-1])
        sparse = abstract_outliers(shape, kept.format, 0.0, kept.columns).outliers
        sized = jax.tree.map(
            lambda part: jax.ShapeDtypeStruct((*part.shape[:-1], count), part.dtype), sparse
        )
        return OutlierTensor(kept, sized)
    if isinstance(parameter, QuantizedTensor):
        part = abstract(shape, parameter.format, columns_here(parameter.format))
        return replace(part, activations=parameter.activations)
    return jax.ShapeDtypeStruct(shape, parameter.dtype)


def check_blocks(parameter: Any, shares: Shares) -> None:
    """Raises `ShareError` where a block of a quantized parameter would be on two devices."""
    unit, share = block_of(parameter), shares.get(len(parameter.shape) - 1)
    if share is None or unit == 1:
        return
    for start, count in zip(share.starts, share.counts, strict=True):
        # Where parts are smaller than a block, several may have some of one.
        inside = start // unit == (start + count - 1) // unit
        if count and start % unit and not inside:
            raise ShareError(
                f"parts of {share.size} of its {share.total} columns do not end where its "
                f"quantized blocks of {unit} do"
            )


def block_of(parameter: Any) -> int:
    """Columns of a parameter that share numbers; 1 for one that is not quantized."""
    if isinstance(parameter, OutlierTensor):
        return block_of(parameter.rounded)
    if not isinstance(parameter, QuantizedTensor):
        return 1
    return SUPER if parameter.format.two_level else parameter.format.block


def as_here(values: Any) -> Any:
    """A parameter packed as the kind of device wants it that is worked for."""
    if isinstance(values, OutlierTensor):
        return replace(values, rounded=as_here(values.rounded))
    if isinstance(values, QuantizedTensor):
        made = with_columns(values, columns_here(values.format))
        return replace(made, activations=values.activations)
    return values


def cut(values: Any, shares: Shares, part: int) -> Any:
    """One device's part of a parameter, in NumPy's arrays."""
    if not shares:
        return values
    if isinstance(values, OutlierTensor):
        return OutlierTensor(
            cut(values.rounded, shares, part), _sparse_part(values.outliers, shares, part)
        )
    if isinstance(values, QuantizedTensor):
        return _quantized_part(values, shares, part)
    for axis, share in shares.items():
        values = _along(values, axis, share, part)
    return _own(values)


def _own(values: np.ndarray) -> np.ndarray:
    """A copy: a CPU's device may take a view as it is, and would keep the whole with it."""
    return np.array(values, order="C")


def once(values: np.ndarray, part: int) -> np.ndarray:
    """What is added to a sum of all devices' parts: the first one has it, the others zeros."""
    return values if part == 0 else np.zeros_like(values)


def _along(values: np.ndarray, axis: int, share: Share, part: int) -> np.ndarray:
    """A part along an axis, with zeros where it ends in padding."""
    begin, count = share.starts[part], share.counts[part]
    taken = values[(slice(None),) * axis + (slice(begin, begin + count),)]
    if count == share.size:
        return taken
    more = [(0, 0)] * values.ndim
    more[axis] = (0, share.size - count)
    return np.pad(taken, more)


def _quantized_part(tensor: QuantizedTensor, shares: Shares, part: int) -> QuantizedTensor:
    stack = len(tensor.stack)
    rows, columns = shares.get(stack), shares.get(stack + 1)
    if (fast := _tiles(tensor, rows, columns, part)) is not None:
        return fast
    codes, scales, steps = to_codes(tensor)
    codes = codes[..., : tensor.inputs]
    if rows is not None:
        codes, scales = (_along(each, stack, rows, part) for each in (codes, scales))
        steps = None if steps is None else _along(steps, stack, rows, part)
    if columns is not None:
        codes = _along(codes, stack + 1, columns, part)
        scales = _numbers(scales, tensor.format.block, columns, part)
        steps = None if steps is None else _numbers(steps, SUPER, columns, part)
    made = from_codes(
        np.ascontiguousarray(codes), scales, tensor.format, steps=steps, columns=tensor.columns
    )
    return replace(made, activations=tensor.activations)


def _numbers(numbers: np.ndarray, block: int, share: Share, part: int) -> np.ndarray:
    """The blocks' numbers [..., rows, blocks, n] of some columns; those of padding are zeros."""
    begin, count = share.starts[part], share.counts[part]
    first, last = begin // block, -(-(begin + count) // block)
    taken = numbers[..., first:last, :] if count else numbers[..., :0, :]
    missing = -(-share.size // block) - taken.shape[-2]
    return np.pad(taken, [(0, 0)] * (taken.ndim - 2) + [(0, missing), (0, 0)])


def _tiles(
    tensor: QuantizedTensor, rows: Share | None, columns: Share | None, part: int
) -> QuantizedTensor | None:
    """A part of whole tiles and superblocks, which needs not be packed anew; else None."""
    stack = len(tensor.stack)
    superblock = 32 * tensor.format.per_code * tensor.columns
    units = tensor.rows, max(superblock, tensor.format.block)
    shape = [tensor.outputs, tensor.inputs]
    ends = [(0, tensor.words.shape[stack] * tensor.rows), (0, tensor.padded_inputs)]
    for axis, (share, unit) in enumerate(zip((rows, columns), units, strict=True)):
        if share is None:
            continue
        begin, count = share.starts[part], share.counts[part]
        if begin % unit or share.size % unit or count != share.size:
            return None
        ends[axis], shape[axis] = (begin, begin + count), share.size

    def of(array: Any) -> np.ndarray:
        sizes = tensor.rows, tensor.padded_inputs // array.shape[stack + 1]  # weights of a place
        cuts = (slice(a // size, b // size) for (a, b), size in zip(ends, sizes, strict=True))
        return _own(np.asarray(array)[(slice(None),) * stack + tuple(cuts)])

    words, scales, steps = (
        None if each is None else of(each) for each in (tensor.words, tensor.scales, tensor.steps)
    )
    kept = tensor.format, shape[0], shape[1], tensor.activations
    return QuantizedTensor(words, scales, steps, *kept)


def _sparse_part(sparse: SparseTensor, shares: Shares, part: int) -> SparseTensor:
    """The entries in a device's part, of which there is room for as many as in the whole."""
    stack = sparse.values.shape[:-1]
    sizes = [sparse.outputs, sparse.inputs]
    keep = np.asarray(sparse.rows) < sparse.outputs
    places = [np.asarray(sparse.rows), np.asarray(sparse.columns)]
    for axis in range(2):
        if (share := shares.get(len(stack) + axis)) is None:
            continue
        places[axis] = places[axis] - share.starts[part]
        keep &= (places[axis] >= 0) & (places[axis] < share.counts[part])
        sizes[axis] = share.size
    values = np.asarray(sparse.values)
    order = np.argsort(~keep, axis=-1, kind="stable")
    kept = np.take_along_axis(keep, order, axis=-1)

    def moved(each: np.ndarray, empty: int) -> np.ndarray:
        there = np.take_along_axis(each, order, axis=-1)
        return np.where(kept, there, np.asarray(empty, each.dtype)).astype(each.dtype)

    return SparseTensor(
        moved(places[0].astype(np.int32), sizes[0]),
        moved(places[1].astype(np.int32), 0),
        moved(values, 0),
        *sizes,
    )

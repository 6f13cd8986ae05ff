"""Grouped codes of quantized checkpoints (GPTQ, AWQ, MLX, ...) kept in their bits, as blocks.

A group of 32, 64 or 128 inputs is a block; a wider group is several blocks with equal numbers. With
fp16 block numbers

    scale * (q - zero)   symmetric if zero is half of the levels: without loss for fp16 scales
    scale * (q - zero)   else affine, base = -scale * zero: rounded to fp16; or symmetric with a
                         bit more, of codes q - zero: without loss
    scale * q + bias     affine, without loss for fp16 numbers
    scale * values[q]    a codebook: the values times a factor, rounded to integers; blocks of 16
                         with two-level scales (`split_scales`)

Reordered inputs are sorted by their groups, and the order is stored (`ReorderedTensor`). The loss
is measured in steps, the distance between two levels. If it is too large, or groups have other
sizes, weights are decoded instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, get_args

import jax
import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import Tensor
from jinfer.loader.checkpoint.grouped_codes import GroupedCodes, ScaledValues
from jinfer.quant.quantized_tensor import SUPER, QuantizedTensor, empty_tensor, from_codes
from jinfer.quant.reordered_tensor import ReorderedTensor
from jinfer.quant.scaled_tensor import block_of
from jinfer.quant_format import QuantFormat, Width

if TYPE_CHECKING:
    from jaxtyping import Float, Float16, Int, Int8

_MOST = 127  # of the integers


@np.errstate(all="ignore")  # NaN and infinity are values like others
def split_scales(
    scales: Float[np.ndarray, "*rows blocks"], unit: Float[np.ndarray, "*rows 1"], block: int
) -> tuple[Int8[np.ndarray, "*rows blocks"], Float16[np.ndarray, "*rows supers"]]:
    """Integers of blocks, and the factors of 256 weights.

    Args:
        unit: what scales are small floats times.
        block: weights of a scale.
    """
    parts = _parted(scales, block)
    largest = np.abs(parts).max(axis=-1) / unit
    power = np.ceil(np.log2(np.where(largest > 0, largest, 1) / _MOST))
    steps = (unit * np.exp2(power)).astype(np.float32)
    integers = np.clip(np.rint(parts / steps[..., None]), -_MOST, _MOST)
    integers = np.nan_to_num(integers).astype(np.int8).reshape(*scales.shape[:-1], -1)
    return integers[..., : scales.shape[-1]], steps.astype(np.float16)


@np.errstate(all="ignore")
def split_error(
    scales: Float[np.ndarray, "*rows blocks"], unit: Float[np.ndarray, "*rows 1"], block: int
) -> float:
    """How far off a scale is at most, relative to the largest of its 256 weights."""
    integers, steps = split_scales(scales, unit, block)
    wide = np.repeat(steps.astype(np.float32), SUPER // block, axis=-1)[..., : scales.shape[-1]]
    largest = np.abs(_parted(scales, block)).max(axis=-1, keepdims=True)
    off = np.abs(_parted(integers * wide - scales, block))
    return float(np.where(off == 0, 0, off / largest).max(initial=0))


def _parted(scales: np.ndarray, block: int) -> np.ndarray:
    """[*rows, blocks] -> [*rows, supers, blocks of one], with zeros behind the last."""
    per_super = SUPER // block
    padding = [(0, 0)] * (scales.ndim - 1) + [(0, -scales.shape[-1] % per_super)]
    return np.pad(scales, padding).reshape(*scales.shape[:-1], -1, per_super)


_BLOCKS = (128, 64, 32)
_SMALL = 16  # of NVFP4
_MAX_LOST = 0.125  # steps
_MAX_VALUE = 127  # of a codebook
_any_value = np.errstate(all="ignore")  # NaN and infinity are values like others


@dataclass(frozen=True)
class GroupedFormat:
    """How grouped codes are stored.

    Attributes:
        format: format of the blocks.
        lost: maximum error of a weight, in steps, because numbers are rounded to fp16.
        reordered: whether inputs are sorted by their groups, and their order is stored.
    """

    format: QuantFormat
    lost: float
    reordered: bool


def grouped_format(tensors: Sequence[Tensor], exact: bool) -> GroupedFormat | None:
    """Choose the format for the tensors of a parameter; None if they have to be decoded.

    Reads the scales.

    Args:
        exact: allow no loss, which may take a bit more for each weight.

    Raises:
        CheckpointError: the file is broken.
    """
    codes = [tensor.codes for tensor in tensors if tensor.codes is not None]
    choices = {_formats(grouped) for grouped in codes}
    if len(codes) < len(tensors) or len(choices) != 1:
        return None
    for format in choices.pop():
        lost = max(_lost(grouped, format) for grouped in codes)
        if lost <= (0 if exact else _MAX_LOST):
            return GroupedFormat(format, lost, any(grouped.order is not None for grouped in codes))
    return None


def kept_blocks(values: ScaledValues | None, inputs: int) -> int | None:
    """Return the blocks of a row if a matrix can be a `ScaledTensor`, else None."""
    if values is None or values.blocks < 1:
        return None
    fits = values.blocks == 1 or block_of(inputs, values.blocks) == values.block
    return values.blocks if fits else None


def described(format: QuantFormat) -> str:
    """Return a format's name for messages, which mentions a codebook."""
    return f"{format.name} of a table" if format.codebook is not None else format.name


def grouped_tensor(
    tensors: Sequence[Tensor],
    stacked: bool,
    kept: GroupedFormat,
    rows: Int[np.ndarray, " outputs"] | None,
    columns: int | None,
) -> QuantizedTensor | ReorderedTensor:
    """Read matrices with the stored codes.

    Args:
        tensors: those for which `grouped_format` returns `kept`.
        stacked: stack them along a new first axis; else there is a single tensor.
        rows: rows of each matrix to read, in this order; None: all.
        columns: see `from_codes`.

    Returns:
        A tensor of NumPy arrays.

    Raises:
        CheckpointError: a file is broken.
    """
    blocks = _stack_of(tensors, stacked, kept.format, rows, columns)
    if not kept.reordered:
        return blocks
    orders = [_sorted_inputs(tensor.codes) for tensor in tensors if tensor.codes is not None]
    order = np.stack(orders) if stacked else orders[0]
    return ReorderedTensor(np.broadcast_to(order, (*blocks.stack, blocks.inputs)).copy(), blocks)


def _stack_of(
    tensors: Sequence[Tensor],
    stacked: bool,
    format: QuantFormat,
    rows: np.ndarray | None,
    columns: int | None,
) -> QuantizedTensor:
    if not stacked:
        return _blocks_of(tensors[0], format, rows, columns)
    result = None
    for e, tensor in enumerate(tensors):
        part = _blocks_of(tensor, format, rows, columns)
        if result is None:
            result = empty_tensor((len(tensors), *part.shape), format, columns)
        for to, values in zip(jax.tree.leaves(result[e]), jax.tree.leaves(part), strict=True):
            to[...] = values
    assert result is not None, "a parameter has tensors"
    return result


def _blocks_of(
    tensor: Tensor, format: QuantFormat, rows: np.ndarray | None, columns: int | None
) -> QuantizedTensor:
    grouped = tensor.codes
    assert grouped is not None, "the file has such codes"
    codes, steps = grouped.codes(), None
    if format.two_level:
        integers, factors = split_scales(_exact(grouped, format)[0], _unit(grouped), format.block)
        numbers, steps = integers[..., None], factors[..., None]
    else:
        numbers = _numbers(grouped, format)
    if grouped.order is not None:
        codes = np.take(codes, _sorted_inputs(grouped), axis=-1)
    if _is_wider(grouped, format):
        assert grouped.zeros is not None
        zeros = grouped.zeros().astype(np.int16)[..., np.arange(grouped.shape[-1]) // grouped.group]
        codes = (codes - zeros + format.zero).astype(np.uint8)
    if rows is not None:
        codes, numbers = codes[..., rows, :], numbers[..., rows, :, :]
        steps = None if steps is None else steps[..., rows, :, :]
    return from_codes(codes, numbers, format, steps=steps, columns=columns)


def _formats(codes: GroupedCodes) -> tuple[QuantFormat, ...]:
    """The formats that have such groups and such codes, those of the fewest bits first."""
    whole = codes.groups == 1
    group = codes.shape[-1] if whole else codes.group
    block = next((size for size in _BLOCKS if group % size == 0), _BLOCKS[-1] if whole else None)
    two_level = codes.group == _SMALL and codes.values is not None
    block = _SMALL if two_level else block
    if block is None or 0 in codes.shape or not _is_regular(codes):
        return ()
    if codes.values is not None:
        book = _codebook(codes.values)
        if book is None or codes.bits != 4:
            return ()
        return (QuantFormat("4", block, True, two_level, book.integers),)
    named = [(str(codes.bits), codes.zero == 1 << codes.bits - 1)]
    if codes.zeros is not None:
        named.append((str(codes.bits + 1), True))
    known = get_args(Width.__value__)
    return tuple(
        QuantFormat(width, block, symmetric)  # type: ignore[arg-type]
        for width, symmetric in named
        if width in known
    )


def _sorted_inputs(codes: GroupedCodes) -> Int[np.ndarray, " inputs"]:
    """The inputs in the order of their groups, int32."""
    return np.argsort(codes.group_of_inputs(), kind="stable").astype(np.int32)


def _is_regular(codes: GroupedCodes) -> bool:
    """Whether all groups but the last have the same size."""
    if codes.order is None:
        return True
    return np.array_equal(np.sort(codes.order()), np.arange(codes.shape[-1]) // codes.group)


def _is_wider(codes: GroupedCodes, format: QuantFormat) -> bool:
    """Whether the format includes zero points in its codes, which have a bit more."""
    return codes.zeros is not None and format.symmetric


@dataclass(frozen=True)
class _Codebook:
    """Values as integers.

    Attributes:
        integers: the values times the factor, rounded.
        factor: factor of the values.
        step: the least distance of two values, times the factor.
        lost: maximum rounding error, in steps.
    """

    integers: tuple[int, ...]
    factor: float
    step: float
    lost: float


@lru_cache(maxsize=64)
def _codebook(values: tuple[float, ...]) -> _Codebook | None:
    """The integers that lie nearest to the values, times any factor."""
    exact = np.array(values)
    distinct = np.unique(exact)
    if not np.isfinite(exact).all() or len(distinct) < 2:
        return None
    largest, step = np.abs(exact).max(), np.diff(distinct).min()
    # Small factors first: the integers may be exact, as for E2M1.
    factors = [1.0, 2.0, *(np.arange(0.5 * _MAX_VALUE, _MAX_VALUE, 0.05) / largest)]
    found = None
    for factor in factors:
        whole = np.rint(exact * factor)
        lost = float(np.abs(exact * factor - whole).max() / (step * factor))
        if np.abs(whole).max() <= _MAX_VALUE and (found is None or lost < found.lost):
            found = _Codebook(tuple(map(int, whole)), float(factor), float(step * factor), lost)
    return found


@_any_value
def _exact(codes: GroupedCodes, format: QuantFormat) -> tuple[np.ndarray, np.ndarray | None]:
    """Scale and bases before rounding, float32 [*stack, outputs, groups]."""
    scales = codes.scales()
    if format.codebook is not None and codes.values is not None:
        book = _codebook(codes.values)
        return scales / np.float32(1 if book is None else book.factor), None
    if format.symmetric:
        return scales, None
    if codes.biases is not None:
        return scales, codes.biases()
    zeros = codes.zeros() if codes.zeros is not None else np.float32(codes.zero or 0)
    return scales, -scales * zeros


@_any_value
def _numbers(
    codes: GroupedCodes, format: QuantFormat
) -> Float16[np.ndarray, "*stack outputs blocks numbers"]:
    scales, bases = _exact(codes, format)
    parts = (scales,) if bases is None else (scales, bases)
    numbers = np.stack([part.astype(np.float16) for part in parts], axis=-1)
    count = -(-codes.shape[-1] // format.block)
    times = count if codes.groups == 1 else codes.group // format.block
    return np.repeat(numbers, times, axis=-2)[..., :count, :] if times > 1 else numbers


def _unit(codes: GroupedCodes) -> np.ndarray:
    """Return the factor of the scales, which divided by it have few bits."""
    return np.ones((1, 1), np.float32) if codes.unit is None else codes.unit()


@_any_value
def _lost(codes: GroupedCodes, format: QuantFormat) -> float:
    """Return the maximum error of a weight, in steps; infinity if it is unknown.

    With two-level scales a step is the largest of 256 weights.
    """
    scales, bases = _exact(codes, format)
    if format.two_level:
        if not np.isfinite(scales).all():
            return float("inf")
        return split_error(scales, _unit(codes), format.block) * _largest(format)
    if _is_wider(codes, format) and codes.zeros is not None:
        zeros = codes.zeros()
        if not (zeros == np.rint(zeros)).all():
            return float("inf")
    largest, unit, own = _largest(format), 1.0, 0.0
    if codes.values is not None and (book := _codebook(codes.values)) is not None:
        unit, own = book.step, book.lost
    lost = np.abs(scales.astype(np.float16).astype(np.float32) - scales) * largest
    if bases is not None:
        lost = lost + np.abs(bases.astype(np.float16).astype(np.float32) - bases)
    steps = np.where(lost == 0, 0, lost / (np.abs(scales) * unit)) + own
    wrong = ~(steps <= _MAX_LOST)
    if wrong.any() and format.codebook is not None:
        # Groups of zeros may have any scale.
        lookup = np.array(codes.values, np.float32)
        blocks = lookup[codes.codes()].reshape(*codes.shape[:-1], -1, codes.group)
        steps = np.where(wrong & ~blocks.any(axis=-1), 0, steps)
    found = float(steps.max(initial=0))
    return found if found == found else float("inf")


def _largest(format: QuantFormat) -> int:
    """Return the largest factor of a scale."""
    if format.codebook is not None:
        return max(abs(value) for value in format.codebook)
    return format.zero if format.symmetric else format.levels - 1

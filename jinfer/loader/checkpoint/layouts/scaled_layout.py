"""Scaled weights: numbers in FP8 or INT8, and their scales per tensor, row, block or group.

`X.weight` [*stack, o, k] has a tensor of scales, whose shape tells their unit: a single number for
the tensor, [o, 1] or [o] for rows, [ceil(o / B), ceil(k / C)] for blocks of B x C (arXiv
2412.19437, section 3.3), [o, k / g] for groups (MXFP8). Weights are multiplied by them, even if the
name ends in "inv". Scales may be powers of two (E8M0), 2^(e - 127).

The scales of `X` are in `X_scale_inv` (DeepSeek, Transformers) or `X_scale` (AutoFP8, FBGEMM,
modelopt, Quark), or in `.scale`, `.scales` or `.scale_weight` instead of `.weight`. Scales of
activations and of the KV cache are dropped: both are computed in wider types.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod

import ml_dtypes
import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import CheckpointError, Tensor
from jinfer.loader.checkpoint.grouped_codes import GroupedCodes, ScaledValues
from jinfer.loader.checkpoint.layouts.module_tensors import (
    FLOATS,
    INSTEAD,
    ModuleTensors,
    QuantSettings,
    TensorTable,
    as_float32,
)

type Block = tuple[int, int]

FP8 = ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ")
_LEAST_GROUP = 16  # inputs that share a scale, where nothing says how many
SCALES = (*FLOATS, "F8_E8M0", "U8")


def join_fp8(module: ModuleTensors, weight_leaf: str, scale_leaf: str, block: Block | None) -> None:
    """Join a matrix in FP8 with its scales: kept as it is, or decoded to float32 when it is read.

    Args:
        block: rows and columns of a block, if scales are of blocks.

    Raises:
        CheckpointError: the two do not fit.
    """
    weight = module.need(weight_leaf, FP8)
    scales = module.need(scale_leaf, SCALES)
    block = block or _group_block(weight.shape, scales.shape)
    wide = _scale_shape(module, scale_leaf, weight.shape, scales.shape, block)
    is_block = block is not None and wide == block_counts(weight.shape, block)
    sizes = block if is_block else None
    module.join_values(
        f"{weight.type}_BLOCKS" if is_block else f"{weight.type} scaled",
        (weight, scales),
        weight.shape,
        partial(_read_fp8, weight, scales, wide, sizes),
        leaf=weight_leaf,
        scaled=_scaled_values(weight, scales, wide, sizes),
    )


def join_int8(module: ModuleTensors, scale_leaf: str, divided_by: float = 1.0) -> None:
    """Join a matrix in INT8 with its scales, and zero points if it has some: codes that are kept.

    Args:
        divided_by: what scales are divided by first.

    Raises:
        CheckpointError: the two do not fit.
    """
    weight = module.need("weight", ("I8",), (None, None))
    scales = module.need(scale_leaf, FLOATS)
    outputs, inputs = weight.shape
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    if groups > 1 and scales.shape[0] == outputs and inputs % groups == 0:
        wide, group = scales.shape, inputs // groups
    else:
        wide, group = _scale_shape(module, scale_leaf, weight.shape, scales.shape, None), inputs

    zeros = module.find("weight_zero_point", ("I8", "I32", "I64"), scales.shape)

    def read_scales() -> np.ndarray:
        values = as_float32(scales).reshape(wide) / np.float32(divided_by)
        return np.broadcast_to(values, (outputs, groups))

    def read_zeros() -> np.ndarray:
        assert zeros is not None
        return np.broadcast_to(as_float32(zeros).reshape(wide) + 128, (outputs, groups))

    def codes() -> np.ndarray:
        return np.asarray(weight.read()).view(np.uint8) ^ np.uint8(0x80)

    found = GroupedCodes(
        weight.shape,
        8,
        max(1, group),
        codes,
        read_scales,
        zero=128 if zeros is None else None,
        zeros=None if zeros is None else read_zeros,
    )
    module.join("INT8 scaled", (weight, scales, zeros), found)


def read_scale(tensor: Tensor) -> np.ndarray:
    """Scale in float32, powers of two among them."""
    if tensor.type == "U8":
        return tensor.read().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return as_float32(tensor)


def block_counts(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """The shape of an array with a number for each block of a matrix, or of a stack of them."""
    if len(shape) < 2:
        return shape
    *stack, outputs, inputs = shape
    return (*stack, -(-outputs // block[0]), -(-inputs // block[1]))


def _group_block(weight: tuple[int, ...], scales: tuple[int, ...]) -> Block | None:
    """The block that a group of inputs of a row is, if scales are of such."""
    if len(weight) < 2 or len(scales) != len(weight) or scales[:-1] != weight[:-1]:
        return None
    groups = scales[-1]
    whole = groups > 1 and weight[-1] % groups == 0 and weight[-1] // groups >= _LEAST_GROUP
    return (1, weight[-1] // groups) if whole else None


def _scale_shape(
    module: ModuleTensors,
    leaf: str,
    weight: tuple[int, ...],
    scales: tuple[int, ...],
    block: Block | None,
) -> tuple[int, ...]:
    """The shape of scales with as many axes as the weights."""
    if len(weight) >= 2:
        *stack, outputs, _ = weight
        if block is not None and scales == block_counts(weight, block):
            return scales
        row, single = (*stack, outputs, 1), (*stack, 1, 1)
        if scales in (row, row[:-1]):
            return row
        if scales in (single, (*stack, 1), tuple(stack)):
            return single
        if scales in ((), (1,)):
            return (1,) * len(weight)
    sizes = f" in blocks of {block[0]} x {block[1]}" if block is not None else ""
    hint = "; look at quantization_config.weight_block_size" if block is not None else ""
    raise module.fail(leaf, f"is {list(scales)}, which does not fit {list(weight)}{sizes}{hint}")


def _scaled_values(
    weight: Tensor, scales: Tensor, wide: tuple[int, ...], block: Block | None
) -> ScaledValues | None:
    """Return E4M3 with its scales; None for other types, and for vectors."""
    if weight.type != FP8[0] or len(weight.shape) < 2 or 0 in weight.shape:
        return None

    def of_rows() -> np.ndarray:
        factors = read_scale(scales).reshape(wide)
        height = 1 if block is None else block[0]
        rows = np.repeat(factors, height, axis=-2)[..., : weight.shape[-2], :]
        return np.broadcast_to(rows, (*weight.shape[:-1], wide[-1]))

    size = weight.shape[-1] if block is None else block[1]
    return ScaledValues(weight.read, of_rows, size, wide[-1])


def _read_fp8(
    weight: Tensor, scales: Tensor, wide: tuple[int, ...], block: Block | None
) -> np.ndarray:
    values = weight.read().astype(np.float32)
    factors = read_scale(scales).reshape(wide)
    if block is None:
        values *= factors
        return values
    for i in range(factors.shape[-2]):
        rows = slice(i * block[0], (i + 1) * block[0])
        row = np.repeat(factors[..., i, :], block[1], axis=-1)[..., : values.shape[-1]]
        values[..., rows, :] *= row[..., None, :]
    return values


# Scales of activations and of the KV cache.
UNUSED_SCALES: tuple[str, ...] = ("input_scale", "activation_scale", "input_scale_ub")
UNUSED_SCALES += ("output_scale", "scale_input", "scaled_fp8")
UNUSED_SCALES += ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_output_scale")
UNUSED_SCALES += ("k_proj.output_scale", "v_proj.output_scale", "input_global_scale")
_INVERSE = "_scale_inv"
_LEAVES = ("scale", "scales", "scale_weight")  # siblings of "weight"
_USUAL_BLOCK = (128, 128)
_SAY_BLOCK = (
    'add quantization_config {"quant_method": "fp8", "weight_block_size": [rows, columns]} to '
    "config.json"
)


def read_fp8(table: TensorTable, settings: QuantSettings) -> None:
    """Join each matrix in FP8 with its scales.

    Raises:
        CheckpointError: scales are missing, or do not fit.
    """
    join_all_fp8(table, block_size(settings, "weight_block_size"))


def block_size(settings: QuantSettings, key: str) -> Block | None:
    """Return the rows and columns of a block; None if the settings have none."""
    block = settings.value(key)
    if block is None:
        return None
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise settings.wrong(key, "is not a list of two sizes above 0")
    return sizes[0], sizes[1]


def join_all_fp8(table: TensorTable, block: Block | None) -> None:
    """Join each matrix in FP8 with its scales; see `read_fp8`.

    Args:
        block: rows and columns of a block; None: scales have no blocks.
    """
    table.drop(UNUSED_SCALES)
    for name in _weights(table):
        scale = _scale_of(table, name)
        if scale is None:
            reason = f"there is no {name[:200] + _INVERSE!r} with its scales: is a file missing?"
            raise table.fail(name, reason)
        several = max((*_find(table, scale).shape, 1)) > 1
        if block is None and several and scale.endswith(_INVERSE):
            raise table.fail(scale, f"the size of its blocks is not known: {_SAY_BLOCK}")
        join_fp8(ModuleTensors(table, ""), name, scale, block)
    for name, scales in table.tensors.items():
        if name.endswith(_INVERSE):
            weight = table.find(name.removesuffix(_INVERSE))
            if weight is None:
                reason = f"there is no {name.removesuffix(_INVERSE)[:200]!r} with its weights"
                raise table.fail(name, f"{reason}: is a file missing?")
            reason = f"scales in {scales.type} for {weight.type}, but they are for {FP8[0]}"
            raise table.fail(name, reason)


def join_undescribed_fp8(table: TensorTable) -> None:
    """Join each matrix in FP8 with its scales, in a checkpoint without quantization settings.

    Scales are applied if their shape is unambiguous: a single number, a number for each row, or
    blocks of 128 x 128 in `X_scale_inv`. If no tensor has scales, the numbers are the weights.

    Raises:
        CheckpointError: other scales, or only some tensors have scales.
    """
    weights = _weights(table)
    modules = {name.removesuffix("weight") for name in weights if name.endswith(".weight")}
    known = {scale for name in weights if (scale := _scale_of(table, name)) is not None}
    block = None
    for name in weights:
        scale = _scale_of(table, name)
        if scale is None:
            continue
        shape, given = _find(table, name).shape, _find(table, scale).shape
        if scale.endswith(_INVERSE) and given == block_counts(shape, _USUAL_BLOCK):
            block = _USUAL_BLOCK
        elif prod(given) != 1 and given not in (shape[:-1], (*shape[:-1], 1)):
            reason = f"is {list(given)} for {list(shape)}, and nothing says what for: {_SAY_BLOCK}"
            raise table.fail(scale, reason)
    for name in table.tensors:
        module, _, leaf = name.rpartition(".")
        unknown = f"{module}." in modules and "scal" in leaf and name not in known
        if unknown and leaf not in UNUSED_SCALES:
            reason = "is next to weights in FP8, and nothing says what for"
            raise table.fail(
                name, f"{reason}: add quantization_config to config.json, or {INSTEAD}"
            )
    if known or any(name.endswith(_INVERSE) for name in table.tensors):
        join_all_fp8(table, block)


def _weights(table: TensorTable) -> list[str]:
    """The tensors in FP8 that are no scales."""
    ends = (_INVERSE, "_scale", "scaled_fp8", *(f".{leaf}" for leaf in _LEAVES))
    return [n for n, t in table.tensors.items() if t.type in FP8 and not n.endswith(ends)]


def _find(table: TensorTable, name: str) -> Tensor:
    tensor = table.find(name)
    assert tensor is not None
    return tensor


def _scale_of(table: TensorTable, name: str) -> str | None:
    """The tensor with the scales of another; None if there is none."""
    names = [name + _INVERSE, name + "_scale"]
    if name.endswith(".weight"):
        names += [name.removesuffix("weight") + leaf for leaf in _LEAVES]
    return next((scale for scale in names if table.find(scale) is not None), None)


CODES = ".weight._data"
PACKED = ".weight._data._data"
_SCALE = ".weight._scale"


def is_quanto(name: str) -> bool:
    """Whether a tensor was written by quanto, which writes no settings to config.json."""
    return name.endswith((CODES, PACKED))


def read_quanto(table: TensorTable) -> None:
    """Join each matrix of optimum-quanto, `X.weight._data`, with its scales, `X.weight._scale`.

    Matrices of 4 and 2 bits (`X.weight._data._data`) are refused: a group is a row of theirs, and
    the file does not have the number of groups in a row of the matrix.

    Raises:
        CheckpointError: scales are missing or do not fit, or a matrix has fewer than 8 bits.
    """
    table.drop(("input_scale", "output_scale"))
    for name, tensor in list(table.tensors.items()):
        if name.endswith(PACKED):
            reason = f"tensor {name[:200]!r}: quanto's 4 and 2 bits do not say their matrix's shape"
            raise CheckpointError(table.path, f"{reason}, and are not read: {INSTEAD}")
        for ending, usual in ((CODES, ".weight"), (_SCALE, ".weight_scale")):
            if name.endswith(ending):
                own = name.removesuffix(ending) + usual
                if table.find(own) is not None:
                    raise table.fail(own, f"exists as well as {name[:200]!r}: which is meant?")
                table.take(name)
                table.put(replace(tensor, name=own))
    for module in table.modules("weight", ("I8",)):
        join_int8(module, "weight_scale")
    join_all_fp8(table, None)

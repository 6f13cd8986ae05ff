"""FP8 checkpoints: matrices in FP8 beside scales, by whatever writer.

`X` in FP8 has its scales in `X_scale_inv` (DeepSeek, Transformers) or `X_scale` (AutoFP8, FBGEMM,
modelopt, Quark), or in `.scale`, `.scales` or `.scale_weight` instead of `.weight`. Scales of
activations and of the KV cache are left out: both are computed in wider types.
"""

from __future__ import annotations

from math import prod

from jinfer.loader.checkpoint.checkpoint_reader import Tensor
from jinfer.loader.checkpoint.layouts.module_tensors import ModuleTensors, TensorTable
from jinfer.loader.checkpoint.layouts.quant_settings import INSTEAD, QuantSettings
from jinfer.loader.checkpoint.layouts.scaled_layout import FP8, Block, block_counts, join_fp8

# Of activations and of the KV cache.
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
    """Joins each matrix in FP8 with its scales.

    Raises:
        CheckpointError: one has none, or they do not fit.
    """
    join_all_fp8(table, block_size(settings, "weight_block_size"))


def block_size(settings: QuantSettings, key: str) -> Block | None:
    """Rows and columns of a block; None where nothing is said."""
    block = settings.value(key)
    if block is None:
        return None
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise settings.wrong(key, "is not a list of two sizes above 0")
    return sizes[0], sizes[1]


def join_all_fp8(table: TensorTable, block: Block | None) -> None:
    """As `read_fp8`.

    Args:
        block: rows and columns that share a scale, where there is one for each.
    """
    table.drop(UNUSED_SCALES)
    for name in _weights(table):
        scale = _scale_of(table, name)
        if scale is None:
            wanted = f"there is no {name[:200] + _INVERSE!r} with its scales: is a file missing?"
            raise table.fail(name, wanted)
        several = max((*_find(table, scale).shape, 1)) > 1
        if block is None and several and scale.endswith(_INVERSE):
            raise table.fail(scale, f"the size of its blocks is not known: {_SAY_BLOCK}")
        join_fp8(ModuleTensors(table, ""), name, scale, block)
    for name, scales in table.tensors.items():
        if name.endswith(_INVERSE):
            weight = table.find(name.removesuffix(_INVERSE))
            if weight is None:
                wanted = f"there is no {name.removesuffix(_INVERSE)[:200]!r} with its weights"
                raise table.fail(name, f"{wanted}: is a file missing?")
            reason = f"scales in {scales.type} for {weight.type}, but they are for {FP8[0]}"
            raise table.fail(name, reason)


def join_undescribed_fp8(table: TensorTable) -> None:
    """As `read_fp8`, where nothing says how weights are quantized.

    Scales are applied where their shape leaves no choice: one number, one for each row of outputs,
    or blocks of 128 x 128 in `X_scale_inv`. Where no tensor has any, all are numbers as they stand.

    Raises:
        CheckpointError: other scales, or some tensors have scales and others none.
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
    return next((each for each in names if table.find(each) is not None), None)

"""compressed-tensors checkpoints (LLM Compressor): packed integers, INT8, FP8, NVFP4, MXFP4.

What a module is stored as follows from its tensors, of several formats in a checkpoint too:

    weight_packed I32 [o, ceil(k b / 32)], weight_scale [o, groups], weight_shape I64 [2];
    perhaps weight_zero_point I32 [ceil(o b / 32), groups], weight_g_idx I32 [k]
        pack-quantized: codes along inputs, zero points along outputs, all with 2^(b - 1) added
    weight I8 [o, k], weight_scale                             int-quantized
    weight F8_E4M3 [o, k], weight_scale                        float-quantized
    weight_packed U8, weight_scale F8_E4M3, weight_global_scale   nvfp4-pack-quantized
    weight_packed U8, weight_scale U8                             mxfp4-pack-quantized
"""

from __future__ import annotations

import numpy as np

from jinfer.loader.checkpoint.grouped_codes import GroupedCodes, unpack_stream
from jinfer.loader.checkpoint.layouts.microscaling_layout import join_mxfp4, join_nvfp4
from jinfer.loader.checkpoint.layouts.module_tensors import (
    FLOATS,
    INDICES,
    WORDS,
    ModuleTensors,
    QuantSettings,
    TensorTable,
    as_float32,
)
from jinfer.loader.checkpoint.layouts.scaled_layout import (
    FP8,
    UNUSED_SCALES,
    Block,
    block_size,
    join_fp8,
    join_int8,
)

_FORMATS: tuple[str, ...] = ("pack-quantized", "int-quantized", "float-quantized")
_FORMATS += ("naive-quantized",)
_FORMATS += ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision", "dense", "")
_BITS = range(2, 9)


def read_compressed(table: TensorTable, settings: QuantSettings) -> None:
    """Join the tensors of each quantized module to its weight.

    Raises:
        CheckpointError: settings or tensors that cannot be read.
    """
    weights = _weight_settings(settings)
    table.drop(UNUSED_SCALES)
    for module in table.modules("weight_packed"):
        stored = module.need("weight_packed", (*WORDS, "U8"))
        if stored.type in WORDS:
            _join_packed(module, weights)
        elif module.has("weight_global_scale"):
            join_nvfp4(module, "weight_packed", "weight_global_scale", divide=True)
        else:
            join_mxfp4(module, "weight_packed")
    for module in table.modules("weight", ("I8",)):
        join_int8(module, "weight_scale")
    block = next((found for group in weights if (found := _block(group)) is not None), None)
    for module in table.modules("weight", FP8):
        if module.has("weight_zero_point"):
            _check_zero(module)
        join_fp8(module, "weight", "weight_scale", block)


def _weight_settings(settings: QuantSettings) -> list[QuantSettings]:
    """Return the weight settings of each group of modules."""
    tables = [settings]
    for key in ("transform_config", "sparsity_config"):
        inner = settings.inner(key)
        if inner is not None and inner.table and inner.text("format", "x") != "dense":
            raise settings.refused(f"{key}")
    groups = settings.inner("config_groups")
    names = list(groups.table) if groups is not None else []
    tables += [group for name in names if groups is not None and (group := groups.inner(name))]
    for group in tables:
        if (format := group.text("format")) not in _FORMATS:
            raise group.refused(f"format {format[:40]!r}")
    return [found for group in tables if (found := group.inner("weights")) is not None]


def _block(weights: QuantSettings) -> Block | None:
    return block_size(weights, "block_structure")


def _check_zero(module: ModuleTensors) -> None:
    """Remove zero points, which floats have all 0."""
    zeros = module.need("weight_zero_point", ("I8", *WORDS, *INDICES, *FP8, *FLOATS))
    if zeros.read().astype(np.float32).any():
        reason = "is not 0: zero points of weights in FP8 are not read"
        raise module.fail("weight_zero_point", reason)
    module.table.take(zeros.name)


def _join_packed(module: ModuleTensors, weights: list[QuantSettings]) -> None:
    packed = module.need("weight_packed", WORDS, (None, None))
    sizes = module.need("weight_shape", INDICES, (2,))
    outputs, inputs = (int(size) for size in sizes.read())
    rows, words = packed.shape
    bits = {settings.number("num_bits", among=_BITS) for settings in weights}
    bits = {b for b in bits if words == -(-inputs * b // 32)}
    if rows != outputs or len(bits) != 1 or inputs < 1:
        reason = f"is {list(packed.shape)}, which does not fit weight_shape {[outputs, inputs]}"
        raise module.fail("weight_packed", f"{reason} and the bits that config.json says")
    (b,) = bits
    scales = module.need("weight_scale", FLOATS, (outputs, None))
    groups = scales.shape[1]
    stated = [settings.value("group_size") for settings in weights]
    group = module.group_size("weight_scale", inputs, groups, stated)
    zeros = module.find("weight_zero_point", WORDS, (-(-outputs * b // 32), groups))
    indices = module.find("weight_g_idx", INDICES, (inputs,))

    def codes() -> np.ndarray:
        return unpack_stream(packed.read(), b)[:, :inputs]

    def zero_points() -> np.ndarray:
        assert zeros is not None
        stored = unpack_stream(np.asarray(zeros.read()).T, b)[:, :outputs]
        return np.ascontiguousarray(stored.T).astype(np.float32)

    codes_of = GroupedCodes(
        (outputs, inputs),
        b,
        group,
        codes,
        lambda: as_float32(scales),
        zero=1 << b - 1 if zeros is None else None,
        zeros=None if zeros is None else zero_points,
        order=module.input_groups("weight_g_idx", inputs, groups, group),
    )
    parts = (packed, scales, zeros, indices)
    module.join(f"INT{b} packed", parts, codes_of, unneeded=("weight_shape",))

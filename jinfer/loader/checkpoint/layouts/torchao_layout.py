"""torchao checkpoints: tensor subclasses, flattened into plain tensors and metadata.

`X.weight` is `X._weight_qdata` and `X._weight_scale`, perhaps with `X._weight_zero_point`; the
file's `__metadata__` has under `X.weight` the class, in JSON. Int8Tensor and Float8Tensor: numbers
and scales per tensor, row or group. IntxUnpackedToInt8Tensor: numbers of fewer bits in I8, scales
[o, k / g]. Int4Tensor: two signed numbers a byte, the first in the low half, [o, k / 2]; scales and
zero points [k / g, o]; a weight is scale * q + zero point. The others are in a GPU's order.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import Tensor
from jinfer.loader.checkpoint.grouped_codes import GroupedCodes
from jinfer.loader.checkpoint.layouts.module_tensors import (
    FLOATS,
    ModuleTensors,
    QuantSettings,
    TensorTable,
    as_float32,
)
from jinfer.loader.checkpoint.layouts.scaled_layout import join_all_fp8, join_int8

_CODES = re.compile(r"(.+\.)_([A-Za-z]\w*)_qdata")
_LONGEST = 1 << 16  # characters of a tensor's metadata
_BITS = {f"int{bits}": bits for bits in range(2, 9)}
_SCALED = ("Int8Tensor", "Float8Tensor")


def read_torchao(table: TensorTable, settings: QuantSettings) -> None:
    """Join the tensors of each quantized matrix.

    Raises:
        CheckpointError: a class that is not read, or tensors that do not fit it.
    """
    for name in list(table.tensors):
        if (found := _CODES.fullmatch(name)) is None:
            continue
        module, leaf = ModuleTensors(table, found[1]), found[2]
        metadata = _metadata(table, module, leaf)
        kind, own = metadata.get("_type"), metadata.get("_data")
        if module.has(f"_{leaf}_act_pre_scale"):
            raise module.fail(f"_{leaf}_act_pre_scale", "scales of activations are not read")
        if kind in _SCALED:
            _rename(module, leaf)
        elif kind == "IntxUnpackedToInt8Tensor":
            _join_unpacked(module, leaf, own if isinstance(own, dict) else {})
        elif kind == "Int4Tensor":
            _join_int4(module, leaf)
        else:
            raise settings.refused(f"torchao, with {module.prefix}{leaf} as {str(kind)[:40]}")
    for module in table.modules("weight", ("I8",)):
        join_int8(module, "weight_scale")
    join_all_fp8(table, None)


def _metadata(table: TensorTable, module: ModuleTensors, leaf: str) -> dict[str, Any]:
    """Return the metadata of a matrix."""
    text = table.metadata.get(module.prefix + leaf)
    try:
        metadata = json.loads(text) if isinstance(text, str) and len(text) < _LONGEST else None
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        raise module.fail(f"_{leaf}_qdata", f"__metadata__ does not say of what class {leaf} is")
    return metadata


def _rename(module: ModuleTensors, leaf: str) -> None:
    """Rename numbers and scales as other writers do; drop zero points that are all 0."""
    for ending, usual in (("qdata", ""), ("scale", "_scale"), ("zero_point", "_zero_point")):
        tensor = module.table.find(f"{module.prefix}_{leaf}_{ending}")
        if tensor is None:
            continue
        module.table.take(tensor.name)
        if ending != "zero_point" or np.any(tensor.read()):
            if module.has(leaf + usual):
                raise module.fail(leaf + usual, f"exists as well as {tensor.name[:200]!r}")
            module.table.put(replace(tensor, name=module.prefix + leaf + usual))


def _join_unpacked(module: ModuleTensors, leaf: str, metadata: dict[str, Any]) -> None:
    kind = metadata.get("target_dtype")
    bits = _BITS.get(str(kind.get("_data"))) if isinstance(kind, dict) else None
    if bits is None:
        raise module.fail(f"_{leaf}_qdata", f"its target_dtype is {str(kind)[:60]}: not read")
    stored = module.need(f"_{leaf}_qdata", ("I8",), (None, None))
    outputs, inputs = stored.shape
    scale = module.need(f"_{leaf}_scale", FLOATS, (outputs, None))
    zero = module.find(f"_{leaf}_zero_point", ("I8",), scale.shape)
    groups, half = scale.shape[1], 1 << (bits - 1)
    if not groups or inputs % groups:
        raise module.fail(f"_{leaf}_scale", f"has {groups} groups of {inputs} inputs")

    def codes() -> np.ndarray:
        numbers = stored.read().astype(np.int16) + half
        if ((numbers < 0) | (numbers >= 2 * half)).any():
            raise module.fail(f"_{leaf}_qdata", f"has numbers of more than {bits} bits")
        return numbers.astype(np.uint8)

    found = GroupedCodes(
        stored.shape,
        bits,
        max(1, inputs // groups),
        codes,
        lambda: as_float32(scale),
        **_zeros(zero, half),
    )
    module.join(f"torchao int{bits}", (stored, scale, zero), found, leaf=leaf)


def _zeros(zero: Tensor | None, half: int) -> dict[str, Any]:
    if zero is None or not np.any(zero.read()):
        return {"zero": half}
    return {"zeros": lambda: as_float32(zero) + np.float32(half)}


def _join_int4(module: ModuleTensors, leaf: str) -> None:
    stored = module.need(f"_{leaf}_qdata", ("I8", "U8"))
    if len(stored.shape) not in (2, 3) or not stored.shape[-1]:
        raise module.fail(f"_{leaf}_qdata", f"is {list(stored.shape)}, not [.., outputs, bytes]")
    *stack, outputs, width = stored.shape
    scale = module.need(f"_{leaf}_scale", FLOATS, (*stack, None, outputs))
    zero = module.need(f"_{leaf}_zero_point", FLOATS, scale.shape)
    groups = scale.shape[-2]
    if not groups or 2 * width % groups:
        raise module.fail(f"_{leaf}_scale", f"has {groups} groups of {2 * width} inputs")

    def codes() -> np.ndarray:
        numbers = stored.read().view(np.uint8) ^ np.uint8(0x88)  # from 0 on
        halves = np.stack([numbers & 15, numbers >> 4], axis=-1)
        return halves.reshape(*stack, outputs, 2 * width)

    def scales() -> np.ndarray:
        return as_float32(scale).swapaxes(-1, -2)

    found = GroupedCodes(
        (*stack, outputs, 2 * width),
        4,
        2 * width // groups,
        codes,
        scales,
        biases=lambda: as_float32(zero).swapaxes(-1, -2) - 8 * scales(),
    )
    module.join("torchao int4", (stored, scale, zero), found, leaf=leaf)

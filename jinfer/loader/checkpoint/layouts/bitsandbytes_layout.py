"""bitsandbytes checkpoints: NF4 and FP4 in flat blocks, and LLM.int8.

4 bits (QLoRA, arXiv 2305.14314): `X.weight` U8 [o k / 2, 1], flat, the first of two codes in the
high half; `X.weight.quant_map` F32 [16], the values of the codes; `X.weight.absmax`, a scale for
each block of the flat array; JSON in `X.weight.quant_state.bitsandbytes__nf4` (or `__fp4`). With
double quantization absmax is U8: `nested_quant_map[absmax] * nested_absmax + nested_offset`.

8 bits (arXiv 2208.07339): `X.weight` I8 [o, k] and `X.SCB` [o], the largest magnitude of each row:
a weight is q * SCB / 127.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
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
from jinfer.loader.checkpoint.layouts.scaled_layout import join_int8

_KINDS = ("nf4", "fp4")
_STATE = "weight.quant_state.bitsandbytes__"
_MAX_STATE = 1 << 16  # bytes of JSON


def read_bitsandbytes(table: TensorTable, settings: QuantSettings) -> None:
    """Join the tensors of each quantized module to its weight.

    Raises:
        CheckpointError: settings or tensors that cannot be read.
    """
    for kind in _KINDS:
        for module in table.modules(_STATE + kind):
            _join_four_bits(module, kind)
    for module in table.modules("SCB"):
        layout = module.find("weight_format", ("U8", "I64", "I32"))
        if layout is not None:
            if layout.read().any():
                reason = "is not 0: only matrices stored by rows are read"
                raise module.fail("weight_format", reason)
            table.take(layout.name)
        join_int8(module, "SCB", divided_by=127)


def _join_four_bits(module: ModuleTensors, kind: str) -> None:
    state = _state(module, kind)
    shape, block = _sizes(module, state.get("shape")), state.get("blocksize")
    if type(block) is not int or block < 1 or len(shape) < 2:
        raise module.fail(_STATE + kind, "does not say shape and blocksize")
    count = prod(shape)
    blocks = -(-count // block)
    weight = module.need("weight", ("U8",))
    if prod(weight.shape) != -(-count // 2):
        raise module.fail("weight", f"is {list(weight.shape)}, which does not fit {list(shape)}")
    table = module.need("weight.quant_map", ("F32",), (16,))
    values = tuple(float(value) for value in table.read())
    absmax, parts = _absmax(module, state, blocks)
    unneeded = (_STATE + kind,)

    def codes() -> np.ndarray:
        pairs = np.asarray(weight.read()).reshape(-1)
        flat = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(-1)
        return flat[:count].reshape(shape)

    if shape[-1] % block == 0:  # rows are whole blocks
        *rows, inputs = shape

        def scales() -> np.ndarray:
            return absmax().reshape(*rows, inputs // block)

        found = GroupedCodes(shape, 4, block, codes, scales, values=values)
        module.join(kind.upper(), (weight, *parts, table), found, unneeded=unneeded)
        return

    def decoded() -> np.ndarray:
        looked_up = np.array(values, np.float32)[codes()].reshape(-1)
        return (looked_up * np.repeat(absmax(), block)[:count]).reshape(shape)

    module.join_values(kind.upper(), (weight, *parts, table), shape, decoded, unneeded=unneeded)


def _absmax(
    module: ModuleTensors, state: dict[str, Any], blocks: int
) -> tuple[Callable[[], np.ndarray], list[Tensor]]:
    """The scales of the blocks, and the tensors that they are read from."""
    stored = module.need("weight.absmax", ("F32", "U8"), (blocks,))
    if stored.type == "F32":
        return (lambda: as_float32(stored)), [stored]
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(size) is not int or size < 1 or not isinstance(offset, int | float):
        raise module.fail(
            "weight.absmax", "is U8, but nested_blocksize or nested_offset is missing"
        )
    shift = np.float32(offset)
    outer = module.need("weight.nested_absmax", FLOATS, (-(-blocks // size),))
    table = module.need("weight.nested_quant_map", FLOATS, (256,))

    def read() -> np.ndarray:
        factors = as_float32(table)[stored.read()]
        return factors * np.repeat(as_float32(outer), size)[:blocks] + shift

    return read, [stored, outer, table]


def _state(module: ModuleTensors, kind: str) -> dict[str, Any]:
    tensor = module.need(_STATE + kind, ("U8",), (None,))
    try:
        state = json.loads(tensor.read().tobytes()) if tensor.nbytes <= _MAX_STATE else None
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise module.fail(_STATE + kind, "is not a JSON object")
    return state


def _sizes(module: ModuleTensors, value: Any) -> tuple[int, ...]:
    sizes = value if isinstance(value, list) else []
    if not all(type(size) is int and 0 < size < 1 << 31 for size in sizes):
        raise module.fail("weight", "has a quant_state whose shape is not a list of sizes")
    return tuple(sizes)

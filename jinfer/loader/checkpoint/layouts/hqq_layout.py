"""HQQ checkpoints (half-quadratic quantization): codes packed by halves of a regrouped matrix.

The matrix [o, k] is seen as [n, g], a group a row (axis 1), or [g, n], a group a column (axis 0).
`X.W_q` U8 has its row r in the high half of byte row r, and row r + n / 2 in the low half; with
2 bits four quarters, the first highest; 8 bits are plain; with 3 bits ten tenths in an I32, the
first in bits 27 to 29. `X.scale` and `X.zero` have a number for each group: (q - zero) * scale,
where zero is a fraction. Settings are small tensors of the same module.
"""

from __future__ import annotations

from math import prod

import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import Tensor
from jinfer.loader.checkpoint.grouped_codes import GroupedCodes
from jinfer.loader.checkpoint.layouts.module_tensors import (
    FLOATS,
    INDICES,
    ModuleTensors,
    QuantSettings,
    TensorTable,
    as_float32,
)

_BITS = (2, 3, 4, 8)
_NUMBERS = ("U8", "I8", "I16", "BOOL", *INDICES)
_REFUSED = ("quant_scale", "quant_zero", "view_as_float")
# Settings that are stored as tensors, and not needed.
_UNNEEDED: tuple[str, ...] = ("nbits", "group_size", "shape", "axis", "packing")
_UNNEEDED += ("unpack_view_dtype", "optimize")
_UNNEEDED += ("round_zero", "channel_wise", "compute_dtype", "stores_quant_config")
_UNNEEDED += ("encoded_state_dict", "offload_meta", "scale_quant_params", "zero_quant_params")
_UNNEEDED += _REFUSED


def read_hqq(table: TensorTable, settings: QuantSettings) -> None:
    """Join the tensors of each quantized module to its weight.

    Raises:
        CheckpointError: settings or tensors that cannot be read.
    """
    whole = settings.inner("quant_config") or settings
    params = whole.inner("weight_quant_params") or whole
    for module in table.modules("W_q"):
        _join(module, params)


def _join(module: ModuleTensors, params: QuantSettings) -> None:
    for leaf in _REFUSED:
        if _setting(module, params, leaf, 0):
            raise module.fail(leaf, "is set: such weights are not read")
    bits, axis = _setting(module, params, "nbits", 4), _setting(module, params, "axis", 1)
    sizes = module.need("shape", INDICES, (2,))
    outputs, inputs = (int(size) for size in sizes.read())
    scale = module.need("scale", FLOATS)
    zero = module.need("zero", FLOATS, scale.shape)
    count, groups = outputs * inputs, prod(scale.shape)
    if (
        bits not in _BITS
        or axis not in (0, 1)
        or min(outputs, inputs, groups) < 1
        or count % groups
    ):
        reason = f"is {[outputs, inputs]}, with {groups} groups of {bits} bits along axis {axis}"
        raise module.fail("shape", f"{reason}: not read")
    group = count // groups
    rows, columns = (groups, group) if axis else (group, groups)
    stored = module.need("W_q", ("I32",) if bits == 3 else ("U8",), (_packed(rows, bits), columns))
    if axis and inputs % group == 0:

        def numbers(tensor: Tensor) -> np.ndarray:
            return as_float32(tensor).reshape(outputs, inputs // group)

        found = GroupedCodes(
            (outputs, inputs),
            bits,
            group,
            lambda: _unpack(stored.read(), bits, rows).reshape(outputs, inputs),
            lambda: numbers(scale),
            zeros=lambda: numbers(zero),
        )
        module.join(f"HQQ {bits} bits", (stored, scale, zero), found, unneeded=_UNNEEDED)
        return

    def decoded() -> np.ndarray:
        shape = (groups, 1) if axis else (1, groups)
        codes = _unpack(stored.read(), bits, rows).astype(np.float32)
        values = (codes - as_float32(zero).reshape(shape)) * as_float32(scale).reshape(shape)
        return values.reshape(outputs, inputs)

    module.join_values(
        f"HQQ {bits} bits", (stored, scale, zero), (outputs, inputs), decoded, unneeded=_UNNEEDED
    )


def _packed(rows: int, bits: int) -> int:
    """Rows of bytes, or of words of ten codes."""
    per_word = 10 if bits == 3 else 8 // bits
    return -(-rows // per_word)


def _unpack(stored: np.ndarray, bits: int, rows: int) -> np.ndarray:
    per_word = 10 if bits == 3 else 8 // bits
    mask = (1 << bits) - 1
    shifts = range(bits * (per_word - 1), -1, -bits)
    return np.concatenate([(stored >> s & mask).astype(np.uint8) for s in shifts])[:rows]


def _setting(module: ModuleTensors, params: QuantSettings, leaf: str, default: int) -> int:
    """Return a number from the module's settings, or from config.json."""
    tensor = module.find(leaf, _NUMBERS)
    if tensor is not None and prod(tensor.shape) == 1:
        return int(tensor.read().reshape(-1)[0])
    value = params.value(leaf)
    return int(value) if isinstance(value, int) else default

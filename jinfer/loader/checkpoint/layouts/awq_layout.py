"""AWQ checkpoints (AutoAWQ, version GEMM): codes and zero points packed along outputs.

X.qweight  I32 [k, o / 8]        nibble i of word c is output 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
X.qzeros   I32 [groups, o / 8]   in the same order
X.scales   [groups, o]
"""

from __future__ import annotations

import numpy as np

from jinfer.loader.checkpoint.grouped_codes import GroupedCodes, group_count
from jinfer.loader.checkpoint.layouts.module_tensors import (
    FLOATS,
    WORDS,
    ModuleTensors,
    TensorTable,
    as_float32,
)
from jinfer.loader.checkpoint.layouts.quant_settings import QuantSettings

# Output j of a word is in nibble _NIBBLES[j].
_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def read_awq(table: TensorTable, settings: QuantSettings) -> None:
    """Joins the tensors of each quantized module to its weight.

    Raises:
        CheckpointError: settings or tensors that cannot be read.
    """
    version = settings.text("version", "gemm")
    if version != "gemm":
        raise settings.refused(f"version {version[:40]!r}")
    key = "bits" if settings.value("w_bit") is None else "w_bit"
    settings.number(key, among=(4,))
    key = "group_size" if settings.value("q_group_size") is None else "q_group_size"
    group = settings.number(key, default=128)
    for module in table.modules("qweight"):
        _join(module, group)


def _join(module: ModuleTensors, group: int) -> None:
    qweight = module.need("qweight", WORDS, (None, None))
    inputs, words = qweight.shape
    scales = module.need("scales", FLOATS, (None, 8 * words))
    groups = scales.shape[0]
    qzeros = module.need("qzeros", WORDS, (groups, words))
    group = group if group > 0 else max(1, inputs)
    if group_count(inputs, group) != groups:
        reason = f"has {groups} groups for {inputs} inputs, but group_size is {group}"
        raise module.fail("scales", reason)
    found = GroupedCodes(
        (8 * words, inputs),
        4,
        group,
        lambda: _unpack(qweight.read()),
        lambda: np.ascontiguousarray(as_float32(scales).T),
        zeros=lambda: _unpack(qzeros.read()).astype(np.float32),
    )
    module.join("AWQ 4 bits", (qweight, scales, qzeros), found)


def _unpack(words: np.ndarray) -> np.ndarray:
    """I32 [rows, words] -> uint8 [8 words, rows]."""
    columns = np.ascontiguousarray(words.T)
    fields = columns.astype("<i4", copy=False).view(np.uint8).reshape(*columns.shape, 4)
    codes = np.empty((columns.shape[0], 8, columns.shape[1]), np.uint8)
    for output, nibble in enumerate(_NIBBLES):
        np.right_shift(fields[..., nibble // 2], 4 * (nibble % 2), out=codes[:, output])
    codes &= np.uint8(15)
    return codes.reshape(-1, columns.shape[1])

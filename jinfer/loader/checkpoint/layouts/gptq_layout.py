"""GPTQ and AWQ checkpoints: codes of groups, packed in words of 32 bits.

GPTQ (AutoGPTQ, GPTQModel) packs codes along inputs, zero points along outputs.

Of a matrix of o outputs and k inputs, in groups of g inputs and with b bits a code:

    X.qweight  I32 [k b / 32, o]   a stream of bits along inputs, the lowest first
    X.qzeros   I32 [groups, o b / 32]   a stream along outputs
    X.scales   [groups, o]
    X.g_idx    I32 [k]   the group of each input; where it is missing, input // g

The first version of the format stores zero points minus 1, which wrap around; the second
(`gptq_v2`) stores them unchanged. With `sym` they are half of the levels, and the stored zero
points, in which writers differ, are ignored. Without the key `sym` the stored zero points apply.

AWQ (AutoAWQ, version GEMM) packs codes and zero points along outputs:

    X.qweight  I32 [k, o / 8]        nibble i of word c is output 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
    X.qzeros   I32 [groups, o / 8]   in the same order
    X.scales   [groups, o]
"""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import Tensor
from jinfer.loader.checkpoint.grouped_codes import GroupedCodes, unpack_stream
from jinfer.loader.checkpoint.layouts.module_tensors import (
    FLOATS,
    INDICES,
    WORDS,
    ModuleTensors,
    QuantSettings,
    TensorTable,
    as_float32,
)

_BITS = (2, 3, 4, 8)
_FORMATS = {"": 1, "gptq": 1, "gptq_v2": 0}  # added to the zero points in the file


def read_gptq(table: TensorTable, settings: QuantSettings) -> None:
    """Join the tensors of each quantized module to its weight.

    Raises:
        CheckpointError: settings or tensors that cannot be read.
    """
    stored = settings.text("checkpoint_format") or settings.text("format")
    if stored not in _FORMATS:
        raise settings.refused(f"checkpoint_format {stored[:40]!r}")
    read_gptq_modules(table, settings, _FORMATS[stored])


def read_gptq_modules(table: TensorTable, settings: QuantSettings, lacking: int) -> None:
    """Join the tensors of each module; see `read_gptq`.

    Args:
        lacking: added to the zero points in the file.
    """
    bits = settings.number("bits", among=_BITS)
    group = settings.number("group_size", default=-1)
    if group < 1 and group != -1:
        raise settings.wrong("group_size", f"is {group}, expected a size or -1")
    symmetric = settings.flag("sym", False)
    has_rules = bool(settings.value("dynamic")) or bool(settings.value("extra_config"))
    for module in table.modules("qweight"):
        _join(module, bits, group, symmetric, lacking, has_rules)
    _drop_zero_biases(table)


def _join(
    module: ModuleTensors, bits: int, group: int, symmetric: bool, lacking: int, has_rules: bool
) -> None:
    qweight = module.need("qweight", WORDS, (None, None))
    packed, outputs = qweight.shape
    scales = module.need("scales", FLOATS, (None, outputs))
    groups = scales.shape[0]
    qzeros = module.find("qzeros", WORDS, (groups, None))
    if qzeros is None and not symmetric:
        raise module.fail("qzeros", "is missing, and config.json does not say sym = true")
    if has_rules and qzeros is not None and outputs:  # rules give some modules other bits
        bits = next((b for b in _BITS if outputs * b == 32 * qzeros.shape[1]), bits)
    inputs = packed * 32 // bits
    if (qzeros is not None and 32 * qzeros.shape[1] != outputs * bits) or packed * 32 % bits:
        reason = f"is {list(qweight.shape)}, which does not fit {bits} bits and the other tensors"
        raise module.fail("qweight", reason)
    group = module.group_size("scales", inputs, groups, (group if group > 0 else inputs,))

    def codes() -> np.ndarray:
        return unpack_stream(np.asarray(qweight.read()).T, bits)

    def zeros() -> np.ndarray:
        assert qzeros is not None
        stored = unpack_stream(qzeros.read(), bits).T
        return ((stored.astype(np.uint16) + lacking) % (1 << bits)).astype(np.float32)

    def scale() -> np.ndarray:
        return np.ascontiguousarray(as_float32(scales).T)

    found = GroupedCodes(
        (outputs, inputs),
        bits,
        group,
        codes,
        scale,
        zero=1 << bits - 1 if symmetric else None,
        zeros=None if symmetric else zeros,
        order=module.input_groups("g_idx", inputs, groups, group),
    )
    indices = module.find("g_idx", INDICES)
    module.join(f"GPTQ {bits} bits", (qweight, scales, qzeros, indices), found)


def _drop_zero_biases(table: TensorTable) -> None:
    """Remove biases that AutoGPTQ adds to modules without any: zeros, in each layer.

    Those of modules whose weights are quantized, where all layers' are 0.
    """
    alike = defaultdict[str, list[Tensor]](list)
    for name, tensor in table.tensors.items():
        weight = table.find(name.removesuffix("bias") + "weight")
        if name.endswith(".bias") and weight is not None and weight.codes is not None:
            alike[re.sub(r"\d+", "*", name)].append(tensor)
    for biases in alike.values():
        if all(bias.type in FLOATS and not bias.read().any() for bias in biases):
            for bias in biases:
                table.take(bias.name)


# Output j of a word is in nibble _AWQ_NIBBLES[j].
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def read_awq(table: TensorTable, settings: QuantSettings) -> None:
    """Join the tensors of each quantized module to its weight.

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
        _join_awq(module, group)


def _join_awq(module: ModuleTensors, group: int) -> None:
    qweight = module.need("qweight", WORDS, (None, None))
    inputs, words = qweight.shape
    scales = module.need("scales", FLOATS, (None, 8 * words))
    groups = scales.shape[0]
    qzeros = module.need("qzeros", WORDS, (groups, words))
    found = GroupedCodes(
        (8 * words, inputs),
        4,
        module.group_size("scales", inputs, groups, (group if group > 0 else inputs,)),
        lambda: _unpack_awq(qweight.read()),
        lambda: np.ascontiguousarray(as_float32(scales).T),
        zeros=lambda: _unpack_awq(qzeros.read()).astype(np.float32),
    )
    module.join("AWQ 4 bits", (qweight, scales, qzeros), found)


def _unpack_awq(words: np.ndarray) -> np.ndarray:
    """I32 [rows, words] -> uint8 [8 words, rows]."""
    columns = np.ascontiguousarray(words.T)
    fields = columns.astype("<i4", copy=False).view(np.uint8).reshape(*columns.shape, 4)
    codes = np.empty((columns.shape[0], 8, columns.shape[1]), np.uint8)
    for output, nibble in enumerate(_AWQ_NIBBLES):
        np.right_shift(fields[..., nibble // 2], 4 * (nibble % 2), out=codes[:, output])
    codes &= np.uint8(15)
    return codes.reshape(-1, columns.shape[1])

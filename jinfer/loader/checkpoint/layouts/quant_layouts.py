"""Quantized checkpoints: a table from `quant_method` to the layout that reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jinfer.loader.checkpoint.checkpoint_reader import Checkpoint
from jinfer.loader.checkpoint.layouts.bitsandbytes_layout import read_bitsandbytes
from jinfer.loader.checkpoint.layouts.compressed_layout import read_compressed
from jinfer.loader.checkpoint.layouts.gptq_layout import read_awq, read_gptq, read_gptq_modules
from jinfer.loader.checkpoint.layouts.hqq_layout import read_hqq
from jinfer.loader.checkpoint.layouts.microscaling_layout import (
    join_blocks,
    join_mxfp4,
    join_nvfp4,
    read_mlx,
)
from jinfer.loader.checkpoint.layouts.module_tensors import QuantSettings, TensorTable
from jinfer.loader.checkpoint.layouts.scaled_layout import (
    UNUSED_SCALES,
    is_quanto,
    join_all_fp8,
    join_int8,
    join_undescribed_fp8,
    read_fp8,
    read_quanto,
)
from jinfer.loader.checkpoint.layouts.torchao_layout import read_torchao

type Layout = Callable[[TensorTable, QuantSettings], None]

_MODELOPT: tuple[str, ...] = (
    "fp8",
    "fp8_per_channel_per_token",
    "mxfp8",
    "nvfp4",
    "w4a16_nvfp4",
    "nvfp4_awq",
)
_MODELOPT += ("mixed_precision",)


def decode_quantized(checkpoint: Checkpoint, settings: QuantSettings | None) -> Checkpoint:
    """Join the tensors of each quantized matrix.

    Only small tensors are read: indices, shapes, zeros. Names stay as they are in the file, and end
    with "weight".

    Args:
        settings: its quantization settings; None if it has none.

    Raises:
        CheckpointError: an unknown layout, or tensors that do not fit it.
    """
    table = TensorTable(checkpoint)
    if settings is not None:
        layout = LAYOUTS.get(method := method_of(settings))
        if layout is None:
            raise settings.refused(f"that the weights are quantized by {method}")
        layout(table, settings)
    elif any(name.endswith(".W_q") for name in table.tensors):  # the hqq package writes no settings
        read_hqq(table, QuantSettings({}, checkpoint.path))
    elif any(map(is_quanto, table.tensors)):
        read_quanto(table)
    else:
        join_undescribed_fp8(table)
    join_blocks(table)
    return table.checkpoint()


def method_of(settings: QuantSettings) -> str:
    """Return the `quant_method`, inferred from other keys if it is missing."""
    method = settings.value("quant_method")
    if method is not None:
        return str(method)[:80].lower().replace("_", "-")
    if any(str(key).startswith("load_in_") for key in settings.table):
        return "bitsandbytes"
    if {"group_size", "bits"} <= settings.table.keys():
        return "mlx"
    if settings.value("config_groups") is not None:
        return "compressed-tensors"
    return "a method without a name"


def _read_auto_round(table: TensorTable, settings: QuantSettings) -> None:
    packing = settings.text("packing_format", "auto_round:auto_gptq").partition(":")[2]
    if packing == "auto_gptq" or (packing == "" and settings.flag("sym", False)):
        read_gptq_modules(table, settings, 1)
    elif packing == "auto_awq":
        read_awq(table, settings)
    elif packing == "llm_compressor":
        read_compressed(table, settings)
    else:
        raise settings.refused(f"packing_format {settings.text('packing_format')[:40]!r}")


def _read_modelopt(table: TensorTable, settings: QuantSettings) -> None:
    algorithm = settings.text("quant_algo") or settings.text("quant_algorithm")
    if algorithm not in _MODELOPT:
        raise settings.refused(f"quant_algo {algorithm[:40]!r}")
    for module in table.modules("weight_scale_2"):
        join_nvfp4(module, "weight", "weight_scale_2", divide=False)
    join_all_fp8(table, None)


def _read_quark(table: TensorTable, settings: QuantSettings) -> None:
    table.drop(UNUSED_SCALES)
    for module in table.modules("weight", ("U8",)):
        join_mxfp4(module, "weight")
    for module in table.modules("weight", ("I8",)):
        join_int8(module, "weight_scale")
    join_all_fp8(table, None)


def _read_mxfp4(table: TensorTable, settings: QuantSettings) -> None:
    """Do nothing: `join_blocks` recognizes these tensors by their names."""


# A layout takes the tensors and settings of a checkpoint, and joins the tensors of each matrix.
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "gptq": read_gptq,
        "awq": read_awq,
        "auto-round": _read_auto_round,
        "intel/auto-round": _read_auto_round,
        "compressed-tensors": read_compressed,
        "sparseml": read_compressed,
        "fp8": read_fp8,
        "fbgemm-fp8": read_fp8,
        "modelopt": _read_modelopt,
        "modelopt-fp4": _read_modelopt,
        "quark": _read_quark,
        "bitsandbytes": read_bitsandbytes,
        "hqq": read_hqq,
        "torchao": read_torchao,
        "quanto": lambda table, settings: read_quanto(table),
        "mlx": read_mlx,
        "mxfp4": _read_mxfp4,
    }
)

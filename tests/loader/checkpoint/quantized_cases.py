"""Quantized checkpoints by hand: one of each layout, writer and variant."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from . import quantized_writers as w
from .quantized_writers import Module, settled

BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True)
class Case:
    """A layout with its settings.

    Attributes:
        config: `quantization_config`.
        write: gives a module of o outputs and k inputs.
        kept: the format that its bits are kept in; "": it is decoded.
        lost: how far off a weight is then, in steps, at most.
        key: of config.json.
        metadata: what the file's own says of the weight.
    """

    config: Mapping[str, Any]
    write: Callable[..., Module]
    kept: str = ""
    lost: float = 0.0
    key: str = field(default="quantization_config")
    metadata: str = ""

    def metadata_of(self, module: str) -> dict[str, str] | None:
        """What a file with a module says of it."""
        return {f"{module}.weight": self.metadata} if self.metadata else None


def _torchao(kind: str, **data: Any) -> dict[str, Any]:
    stated = {"_type": kind, "_data": data}
    return {"config": {"quant_method": "torchao"}, "metadata": json.dumps(stated)}


def _int_of(bits: int) -> dict[str, Any]:
    kind = {"_type": "torch.dtype", "_data": f"int{bits}"}
    return _torchao("IntxUnpackedToInt8Tensor", target_dtype=kind)


def _gptq(**config: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, **config}


def _compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", **weights}}
    return {
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "quantization_status": "compressed", "config_groups": {"group_0": group},
    }  # fmt: skip


def _mlx(bits: int, group: int) -> dict[str, Any]:
    return {"group_size": group, "bits": bits, "mode": "affine"}


_OF_QUANTO = {"weight": "weight._data", "weight_scale": "weight._scale"}
_OF_TORCHAO = {"weight": "_weight_qdata", "weight_scale": "_weight_scale"}
_OF_TORCHAO |= {"weight_zero_point": "_weight_zero_point"}
V2 = {"checkpoint_format": "gptq_v2"}
CASES: dict[str, Case] = {
    "gptq": Case(_gptq(), settled(w.gptq), "q4", 0.0074),
    "gptq_v2": Case(_gptq(**V2), settled(w.gptq, version=2), "q4", 0.0074),
    "gptq_sym": Case(_gptq(sym=True, desc_act=False), settled(w.gptq, sym=True), "q4_sym"),
    # Some say the first version and hold the second: half of the levels all the same.
    "gptq_sym_as_v2": Case(_gptq(sym=True), settled(w.gptq, sym=True, version=2), "q4_sym"),
    "gptq_unsaid": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 32}, settled(w.gptq), "q4", 0.0074
    ),
    "gptq_no_index": Case(_gptq(), settled(w.gptq, with_index=False), "q4", 0.0074),
    "gptq_128": Case(
        _gptq(group_size=128, sym=True), settled(w.gptq, group=128, sym=True), "q4_b128_sym"
    ),
    "gptq_whole_rows": Case(
        _gptq(group_size=-1, sym=True), settled(w.gptq, group=-1, sym=True), "q4_b128_sym"
    ),
    "gptq_2": Case(
        _gptq(bits=2, group_size=64), settled(w.gptq, bits=2, group=64), "q2_b64", 0.0015
    ),
    "gptq_3": Case(_gptq(bits=3), settled(w.gptq, bits=3), "q3", 0.0035),
    "gptq_3_v2": Case(_gptq(bits=3, **V2), settled(w.gptq, bits=3, version=2), "q3", 0.0035),
    "gptq_8_sym": Case(
        _gptq(bits=8, sym=True), settled(w.gptq, bits=8, sym=True), "q8"
    ),
    "gptq_8": Case(_gptq(bits=8), settled(w.gptq, bits=8), "q8_affine", 0.1246),
    "gptq_reordered": Case(_gptq(desc_act=True), settled(w.gptq, reordered=True), "q4", 0.0074),
    "gptq_reordered_sym": Case(
        _gptq(desc_act=True, sym=True), settled(w.gptq, reordered=True, sym=True), "q4_sym"
    ),
    "gptq_dynamic": Case(
        _gptq(dynamic={r"+:.*\.up_proj": {"bits": 8}, r"-:.*down": {}}),
        settled(w.gptq, bits=8), "q8_affine", 0.1246,
    ),
    "auto_round": Case(
        _gptq(quant_method="auto-round", packing_format="auto_round:auto_gptq"),
        settled(w.gptq), "q4", 0.0074,
    ),
    "auto_round_awq": Case(
        {"quant_method": "auto-round", "bits": 4, "group_size": 32,
         "packing_format": "auto_round:auto_awq"},
        settled(w.awq), "q4", 0.0074,
    ),
    "awq": Case(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True,
         "version": "gemm", "modules_to_not_convert": None},
        settled(w.awq), "q4", 0.0074,
    ),
    "awq_128": Case(
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "GEMM"},
        settled(w.awq, group=128), "q4_b128", 0.0074,
    ),
    "pack_sym": Case(
        _compressed("pack-quantized", strategy="group", group_size=32), settled(w.packed_integers),
        "q4_sym",
    ),
    "pack_bf16_128": Case(
        _compressed("pack-quantized", strategy="group", group_size=128, actorder="weight"),
        settled(w.packed_integers, group=128, dtype=BF16), "q4_b128_sym",
    ),
    "pack_asym": Case(
        _compressed("pack-quantized", strategy="group", group_size=64, symmetric=False),
        settled(w.packed_integers, group=64, symmetric=False), "q4_b64", 0.0074,
    ),
    "pack_channel": Case(
        _compressed("pack-quantized", strategy="channel"),
        settled(w.packed_integers, group=-1), "q4_b128_sym",
    ),
    "pack_8": Case(
        _compressed("pack-quantized", num_bits=8, strategy="channel"),
        settled(w.packed_integers, bits=8, group=-1, dtype=BF16), "q8_b128",
    ),
    "pack_3": Case(
        _compressed("pack-quantized", num_bits=3, strategy="group", group_size=32),
        settled(w.packed_integers, bits=3), "q3_sym",
    ),
    "pack_reordered": Case(
        _compressed("pack-quantized", group_size=32, actorder="group"),
        settled(w.packed_integers, reordered=True), "q4_sym",
    ),
    "int8": Case(
        _compressed("int-quantized", num_bits=8, strategy="channel"), settled(w.int8),
        "q8_b128", 0.0626,
    ),
    "int8_bf16": Case(
        _compressed("int-quantized", num_bits=8), settled(w.int8, dtype=BF16), "q8_b128"
    ),
    "int8_asym": Case(
        _compressed("int-quantized", num_bits=8, symmetric=False),
        settled(w.int8, dtype=BF16, symmetric=False), "q8_b128_affine", 0.1246,
    ),
    "int8_tensor": Case(
        _compressed("int-quantized", num_bits=8, strategy="tensor"), settled(w.int8, rows=False),
        "q8_b128", 0.0626,
    ),
    "float_row": Case(
        _compressed("float-quantized", num_bits=8, type="float"),
        settled(w.fp8, per="row", dtype=BF16),
    ),
    "float_tensor": Case(
        _compressed("naive-quantized", num_bits=8, type="float"), settled(w.fp8),
    ),
    "float_block": Case(
        _compressed("float-quantized", num_bits=8, strategy="block", block_structure=[16, 32]),
        settled(w.fp8, per="block"),
    ),
    "nvfp4_packed": Case(
        _compressed("nvfp4-pack-quantized", type="float", group_size=16),
        settled(w.nvfp4, divided=True), "table", 0.1,
    ),
    "mxfp4_packed": Case(
        _compressed("mxfp4-pack-quantized", type="float"), settled(w.mxfp4), "table"
    ),
    "mixed": Case(
        _compressed("mixed-precision", strategy="group", group_size=32),
        settled(w.packed_integers), "q4_sym",
    ),
    "fp8_block": Case(
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
        settled(w.fp8, per="block", leaf="weight_scale_inv"),
    ),
    "fp8_powers": Case(
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
        settled(w.fp8, per="block", leaf="scale", dtype="power"),
    ),
    "fp8_tensor": Case(
        {"quant_method": "fp8", "activation_scheme": "static"}, settled(w.fp8, per="scalar")
    ),
    "fp8_inverse_tensor": Case(
        {"quant_method": "fp8", "weight_block_size": None},
        settled(w.fp8, per="scalar", leaf="weight_scale_inv"),
    ),
    "fbgemm": Case({"quant_method": "fbgemm_fp8"}, settled(w.fp8, per="row")),
    "modelopt_fp8": Case(
        {"quant_method": "modelopt", "quant_algo": "FP8"}, settled(w.fp8, per="scalar")
    ),
    "modelopt_nvfp4": Case(
        {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, settled(w.nvfp4), "table", 0.1
    ),
    "modelopt_nvfp4_awq": Case(
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
        settled(w.nvfp4, inputs_scaled=True),
    ),
    "modelopt_mxfp8": Case(
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        settled(w.fp8, per="group", dtype="power"),
    ),
    "quark_fp8": Case({"quant_method": "quark"}, settled(w.fp8, per="row")),
    "quark_int8": Case({"quant_method": "quark"}, settled(w.int8), "q8_b128", 0.0626),
    "quark_mxfp4": Case({"quant_method": "quark"}, settled(w.mxfp4, leaf="weight"), "table"),
    "nf4": Case(
        {"quant_method": "bitsandbytes", "load_in_4bit": True}, settled(w.four_bits), "table", 0.043
    ),
    "nf4_nested": Case({"load_in_4bit": True}, settled(w.four_bits, nested=True), "table", 0.043),
    "nf4_across_rows": Case(
        {"quant_method": "bitsandbytes"}, settled(w.four_bits, block=512)
    ),
    "fp4": Case({"quant_method": "bitsandbytes"}, settled(w.four_bits, kind="fp4")),
    "llm_int8": Case(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, settled(w.llm_int8),
        "q8_b128", 0.0626,
    ),
    "hqq": Case(
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "axis": 1}}},
        settled(w.hqq), "q4_b64", 0.0074,
    ),
    "hqq_8": Case({"quant_method": "hqq"}, settled(w.hqq, bits=8), "q8_b64_affine", 0.1246),
    "hqq_2": Case({"quant_method": "hqq"}, settled(w.hqq, bits=2), "q2_b64", 0.0015),
    "hqq_3": Case({"quant_method": "hqq"}, settled(w.hqq, bits=3), "q3_b64", 0.0035),
    "hqq_axis_0": Case({"quant_method": "hqq"}, settled(w.hqq, axis=0)),
    **{
        f"mlx_{bits}": Case(_mlx(bits, 64), settled(w.mlx, bits=bits), f"q{bits}_b64_affine",
                            key="quantization")
        for bits in (2, 3, 4, 5, 6, 8)
    },
    "mlx_32": Case(
        _mlx(4, 32), settled(w.mlx, group=32, dtype=np.float16), "q4", key="quantization"
    ),
    **{
        f"mlx_{mode}": Case(
            {"group_size": 16 if mode == "nvfp4" else 32, "bits": 4, "mode": mode},
            settled(w.mlx_float, mode=mode), kept, key="quantization",
        )
        for mode, kept in (("mxfp4", "table"), ("nvfp4", "table"), ("mxfp8", ""))
    },
    "quanto_int8": Case(
        {"quant_method": "quanto"},
        w.renamed(settled(w.int8, dtype=np.float16), _OF_QUANTO), "q8_b128",
    ),
    "quanto_fp8": Case(
        {"quant_method": "quanto"}, w.renamed(settled(w.fp8, per="row"), _OF_QUANTO)
    ),
    "torchao_int8": Case(
        write=w.renamed(settled(w.int8), _OF_TORCHAO), kept="q8_b128", lost=0.0626,
        **_torchao("Int8Tensor"),
    ),
    "torchao_int8_asym": Case(
        write=w.renamed(settled(w.int8, dtype=BF16, symmetric=False), _OF_TORCHAO),
        kept="q8_b128_affine", lost=0.1246, **_torchao("Int8Tensor"),
    ),
    "torchao_fp8": Case(
        write=w.renamed(settled(w.fp8, per="row"), _OF_TORCHAO), **_torchao("Float8Tensor")
    ),
    "torchao_int4_unpacked": Case(write=settled(w.torchao_int), kept="q4_sym", **_int_of(4)),
    "torchao_int3_asym": Case(
        write=settled(w.torchao_int, bits=3, symmetric=False), kept="q3", lost=0.0035, **_int_of(3)
    ),
    "torchao_int4": Case(
        write=settled(w.torchao_int4), kept="q4", lost=0.0074, **_torchao("Int4Tensor")
    ),
    "mlx_unnamed": Case(_mlx(4, 128), settled(w.mlx, group=128), "q4_b128"),
}  # fmt: skip

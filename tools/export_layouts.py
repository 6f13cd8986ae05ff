"""Export layouts: quantized matrices as other engines' checkpoints have them.

A layout holds some formats without change, so that what is written is what was quantized. It names
the arrays of a matrix, and says in the model's configuration what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jinfer.quant import QuantFormat, QuantizedTensor
from jinfer.quant.quantized_tensor import to_codes

if TYPE_CHECKING:
    from jaxtyping import Float16, UInt8


class MatrixCodes(NamedTuple):
    """A quantized matrix, or a stack of them, row by row.

    Attributes:
        codes: of the weights.
        numbers: scale of each block, and its base if the format has one.
        format: what they mean.
    """

    codes: UInt8[np.ndarray, "*stack outputs inputs"]
    numbers: Float16[np.ndarray, "*stack outputs blocks numbers"]
    format: QuantFormat


def codes_of(tensor: QuantizedTensor) -> MatrixCodes:
    """The codes and numbers of a tensor, without padding."""
    codes, numbers, _ = to_codes(tensor)
    blocks = -(-tensor.inputs // tensor.format.block)
    return MatrixCodes(codes[..., : tensor.inputs], numbers[..., :blocks, :], tensor.format)


def joined(parts: Sequence[MatrixCodes]) -> MatrixCodes:
    """Matrices of the same inputs, one below the other."""
    if len(parts) == 1:
        return parts[0]
    codes = np.concatenate([part.codes for part in parts], axis=-2)
    numbers = np.concatenate([part.numbers for part in parts], axis=-3)
    return MatrixCodes(codes, numbers, parts[0].format)


@dataclass(frozen=True)
class SafetensorsLayout:
    """A layout of folders that transformers and vLLM read.

    Attributes:
        holds: whether a format can be written without change.
        formats: those that can, for errors.
        arrays: the arrays of a matrix, by the last parts of their names.
        settings: `quantization_config` of config.json: from the format, and the names of the
            modules that are not quantized.
    """

    holds: Callable[[QuantFormat], bool]
    formats: str
    arrays: Callable[[MatrixCodes], dict[str, np.ndarray]]
    settings: Callable[[QuantFormat, Sequence[str]], dict[str, Any]]


def _evenly_symmetric(format: QuantFormat, widths: Sequence[str]) -> bool:
    plain = format.symmetric and not format.two_level and format.codebook is None
    return plain and format.width in widths


def _bit_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, n] as int32 words [rows, ceil(n bits / 32)], the lowest bits first."""
    each = codes[..., None] >> np.arange(bits, dtype=np.uint8) & np.uint8(1)
    flat = each.reshape(len(codes), -1)
    flat = np.pad(flat, [(0, 0), (0, -flat.shape[1] % 32)])
    return np.packbits(flat, axis=1, bitorder="little").view("<i4")


def _gptq_arrays(matrix: MatrixCodes) -> dict[str, np.ndarray]:
    """Version 1 of the format, see `jinfer.loader.checkpoint.layouts.gptq_layout`."""
    format, (outputs, inputs) = matrix.format, matrix.codes.shape
    blocks = matrix.numbers.shape[1]
    zeros = np.full((blocks, outputs), format.zero - 1, np.uint8)
    return {
        "qweight": np.ascontiguousarray(_bit_stream(matrix.codes, format.code_bits).T),
        "qzeros": _bit_stream(zeros, format.code_bits),
        "scales": np.ascontiguousarray(matrix.numbers[..., 0].T),
        "g_idx": np.arange(inputs, dtype=np.int32) // np.int32(format.block),
    }


def _gptq_settings(format: QuantFormat, plain: Sequence[str]) -> dict[str, Any]:
    settings = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": format.code_bits,
        "group_size": format.block,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
    }
    rules: dict[str, Any] = {
        f"-:^{name.replace('.', chr(92) + '.')}$": {} for name in plain if name != "lm_head"
    }
    return settings | ({"dynamic": rules} if rules else {})


def _packed_arrays(matrix: MatrixCodes) -> dict[str, np.ndarray]:
    """pack-quantized, see `jinfer.loader.checkpoint.layouts.compressed_layout`."""
    return {
        "weight_packed": _bit_stream(matrix.codes, matrix.format.code_bits),
        "weight_scale": np.ascontiguousarray(matrix.numbers[..., 0]),
        "weight_shape": np.array(matrix.codes.shape, np.int64),
    }


def _packed_settings(format: QuantFormat, plain: Sequence[str]) -> dict[str, Any]:
    weights = {
        "num_bits": format.code_bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": format.block,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(plain),
    }


SAFETENSORS_LAYOUTS: Mapping[str, SafetensorsLayout] = {
    "gptq": SafetensorsLayout(
        lambda format: _evenly_symmetric(format, ("2", "3", "4", "8")),
        "q2, q3, q4 or q8, symmetric, such as q4_b128_sym",
        _gptq_arrays,
        _gptq_settings,
    ),
    "compressed-tensors": SafetensorsLayout(
        lambda format: _evenly_symmetric(format, ("4", "8")),
        "q4 or q8, symmetric, such as q4_b128_sym",
        _packed_arrays,
        _packed_settings,
    ),
}


def gguf_type(format: QuantFormat) -> str | None:
    """The GGML type that has the same grid as a format; None: there is none."""
    if format.block != 32 or format.two_level or format.codebook is not None:
        return None
    return _GGUF_TYPES.get((format.width, format.symmetric))


_GGUF_TYPES = {
    ("4", True): "Q4_0",
    ("4", False): "Q4_1",
    ("5", True): "Q5_0",
    ("5", False): "Q5_1",
    ("8", True): "Q8_0",
}
GGUF_FORMATS = "q4, q4_sym, q5, q5_sym or q8, in blocks of 32"


def gguf_blocks(matrix: MatrixCodes) -> UInt8[np.ndarray, "blocks bytes"]:
    """A matrix in blocks of GGML's types: numbers, fifth bits, codes."""
    format = matrix.format
    codes = matrix.codes.reshape(-1, 32)
    numbers = np.ascontiguousarray(matrix.numbers).reshape(len(codes), -1).view(np.uint8)
    if format.width == "8":
        return np.concatenate([numbers, (codes ^ np.uint8(128)).view(np.uint8)], axis=1)
    nibbles = (codes[:, :16] & 15) | (codes[:, 16:] & 15) << 4
    high = np.packbits(codes >> 4, axis=1, bitorder="little")
    parts = (numbers, high, nibbles) if format.width == "5" else (numbers, nibbles)
    return np.concatenate(parts, axis=1)

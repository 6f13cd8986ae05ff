"""Weights in scaled blocks, against the formats' definitions, bit by bit."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfer.loader.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from jinfer.loader.checkpoint.layouts.module_tensors import QuantSettings
from jinfer.loader.checkpoint.layouts.quant_layouts import decode_quantized
from jinfer.loader.checkpoint.layouts.scaled_layout import Block

type Arrays = dict[str, np.ndarray]

FP8 = ml_dtypes.float8_e4m3fn


def minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Sign, exponent and mantissa; exponent 0 is for numbers below the smallest normal one."""
    mantissa = (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    sign = -1.0 if code >> mantissa_bits + exponent_bits else 1.0
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias)
    return sign * (1 + mantissa) * 2.0 ** (exponent - bias)


def e4m3(code: int) -> float:
    return float("nan") if code & 127 == 127 else minifloat(code, 4, 3, bias=7)


def e2m1(code: int) -> float:
    return minifloat(code, 2, 1, bias=1)


def e8m0(code: int) -> float:
    return float("nan") if code == 255 else 2.0 ** (code - 127)


def to_float32(values: Any) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float64).astype(np.float32)


def stored(folder: Path, arrays: Arrays) -> Checkpoint:
    save_file(arrays, folder / "model.safetensors")
    return open_checkpoint(folder)


def decode_scaled(checkpoint: Checkpoint, block: Block | None) -> Checkpoint:
    table = {"quant_method": "fp8", "weight_block_size": None if block is None else [*block]}
    settings = None if block is None else QuantSettings(table, checkpoint.path / "config.json")
    return decode_quantized(checkpoint, settings)


def decoded(folder: Path, arrays: Arrays, block: Block | None = None) -> Arrays:
    tensors = decode_scaled(stored(folder, arrays), block).tensors
    values = {name: tensor.read() for name, tensor in tensors.items()}
    assert all(values[name].shape == tensor.shape for name, tensor in tensors.items())
    return values


def bytes_of(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# FP8.


def test_every_fp8_value(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scale = np.array([[0.75]], np.float32)
    arrays = {"x.weight": codes.view(FP8), "x.weight_scale_inv": scale}
    got = decoded(tmp_path, arrays, (128, 128))
    expected = to_float32([[0.75 * e4m3(int(code)) for code in row] for row in codes])
    assert list(got) == ["x.weight"]
    assert got["x.weight"].dtype == np.float32
    np.testing.assert_array_equal(got["x.weight"], expected)
    np.testing.assert_array_equal(np.signbit(got["x.weight"]), codes > 127)  # also of zeros


@pytest.mark.parametrize("scale_type", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((8, 12), (4, 4)),
        ((9, 13), (4, 4)),
        ((5, 3), (128, 128)),
        ((7, 10), (2, 5)),
        ((1, 9), (3, 2)),
        ((3, 5, 6), (2, 4)),
    ],
)
def test_fp8_blocks(tmp_path: Path, shape: tuple[int, ...], block: Block, scale_type: type) -> None:
    """Whole and cut blocks, of one matrix or of several."""
    codes = bytes_of(*shape) & 0xF7  # no NaN
    counts = [-(-size // of) for size, of in zip(shape[-2:], block, strict=True)]
    factors = np.random.default_rng(1).uniform(0.1, 2, (*shape[:-2], *counts))
    scales: np.ndarray = factors.astype(scale_type)
    got = decoded(tmp_path, {"x": codes.view(FP8), "x_scale_inv": scales}, block)["x"]
    expected = np.empty(shape, np.float32)
    for *outer, row, column in np.ndindex(*shape):
        scale = scales[(*outer, row // block[0], column // block[1])]
        value = e4m3(int(codes[(*outer, row, column)]))
        expected[(*outer, row, column)] = np.float32(value) * np.float32(scale)
    np.testing.assert_array_equal(got, expected)


# MXFP4.


def test_every_mxfp4_value_with_every_exponent(tmp_path: Path) -> None:
    """256 blocks: one for each exponent, with both halves of all kinds in it."""
    codes = np.stack([np.roll(np.arange(16), i) for i in range(256)])  # first halves
    others = np.roll(codes, 3, axis=1)
    blocks = (codes | others << 4).astype(np.uint8)[:, None]
    scales = np.arange(256, dtype=np.uint8)[:, None]
    got = decoded(tmp_path, {"x_blocks": blocks, "x_scales": scales})
    assert list(got) == ["x_blocks"]
    expected = [
        [e2m1(int(c)) * e8m0(i) for pair in zip(codes[i], others[i], strict=True) for c in pair]
        for i in range(256)
    ]
    values = got["x_blocks"]
    assert values.shape == (256, 32)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, to_float32(expected))
    assert np.isnan(values[255]).all()
    signs = [[(c >> 3) & 1 for p in zip(codes[0], others[0], strict=True) for c in p]]
    np.testing.assert_array_equal(np.signbit(values[:1]), signs)  # also of zeros


@pytest.mark.parametrize("kind", [np.uint8, ml_dtypes.float8_e8m0fnu])
@pytest.mark.parametrize("outer", [(), (5,), (3, 4)])
def test_mxfp4_blocks(tmp_path: Path, outer: tuple[int, ...], kind: Any) -> None:
    """Blocks lie along the last axis, one after the other."""
    blocks, scales = bytes_of(*outer, 3, 16), bytes_of(*outer, 3, seed=1) // 8 + 110
    got = decoded(tmp_path, {"x_blocks": blocks, "x_scales": scales.view(kind)})["x_blocks"]
    assert got.shape == (*outer, 96)
    for *index, column in np.ndindex(*got.shape):
        byte = int(blocks[(*index, column // 32, column % 32 // 2)])
        value = e2m1(byte >> 4 if column % 2 else byte & 15)
        assert got[(*index, column)] == value * e8m0(int(scales[(*index, column // 32)]))


# Both.


def test_other_tensors_stay_as_they_are(tmp_path: Path) -> None:
    arrays = {
        "a": np.ones((2, 2), np.float32),
        "scales": bytes_of(3),
        "float_scales": np.ones(3, np.float32),
        "res_blocks": np.ones((3, 16), np.float16),
        "plain": bytes_of(2, 2).view(FP8),
    }
    checkpoint = stored(tmp_path, arrays)
    assert decode_scaled(checkpoint, None) == checkpoint


def test_fields_of_a_decoded_tensor(tmp_path: Path) -> None:
    """Type and bytes are those of the file."""
    arrays = {
        "x": bytes_of(8, 8).view(FP8),
        "x_scale_inv": np.ones((2, 2), np.float32),
        "y_blocks": bytes_of(5, 2, 16),
        "y_scales": bytes_of(5, 2),
    }
    tensors = decode_scaled(stored(tmp_path, arrays), (4, 4)).tensors
    found = {name: (tensor.type, tensor.nbytes) for name, tensor in tensors.items()}
    assert found == {"x": ("F8_E4M3_BLOCKS", 80), "y_blocks": ("MXFP4_BLOCKS", 170)}
    for name, scales in (("x", "x_scale_inv"), ("y_blocks", "y_scales")):
        assert tensors[name].raw().tobytes() == arrays[name].tobytes() + arrays[scales].tobytes()


ROWS, COLUMNS = 512, 2048


def fp8_file() -> Arrays:
    scales = np.ones((ROWS // 128, COLUMNS // 128), np.float32)
    return {"x": bytes_of(ROWS, COLUMNS).view(FP8), "x_scale_inv": scales}


def mxfp4_file() -> Arrays:
    scales = bytes_of(8, ROWS // 8, COLUMNS // 32)
    return {"x_blocks": bytes_of(8, ROWS // 8, COLUMNS // 32, 16), "x_scales": scales}


@pytest.mark.parametrize("make", [fp8_file, mxfp4_file])
def test_memory(tmp_path: Path, make: Callable[[], Arrays]) -> None:
    """Opening reads nothing; reading needs the result, and little besides."""
    checkpoint = stored(tmp_path, make())
    result = 4 * ROWS * COLUMNS
    tracemalloc.start()
    try:
        tensor = next(iter(decode_scaled(checkpoint, (128, 128)).tensors.values()))
        assert tracemalloc.get_traced_memory()[1] < 100_000
        assert tensor.read().nbytes == result
        assert tracemalloc.get_traced_memory()[1] < 1.6 * result
    finally:
        tracemalloc.stop()


# What does not fit.

F32 = np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("arrays", "block", "words"),
    [
        ({"x_scale_inv": F32}, (4, 4), "'x_scale_inv': there is no 'x' with its weights: is a"),
        ({"x": F32.astype(FP8)}, (4, 4), "'x': there is no 'x_scale_inv' with its scales: is a"),
        ({"x": F32.astype(FP8), "x_scale_inv": F32}, None, 'fp8", "weight_block_size": .rows, col'),
        ({"x": F32.astype(FP8), "x_scale_inv": F32}, (4, 4), r"is \[2, 2\], which does not fit"),
        ({"x": F32[0].astype(FP8), "x_scale_inv": F32[0]}, (1, 1), r"is \[2\], which does not fit"),
        ({"x": F32, "x_scale_inv": F32}, (1, 1), "scales in F32 for F32"),
        ({"x": F32.astype(FP8), "x_scale_inv": F32.astype(int)}, (1, 1), "is I64, expected F16 or"),
        ({"x_blocks": bytes_of(2, 16)}, None, "there is no 'x_scales' with its scales: is a file"),
        ({"x_scales": bytes_of(2)}, None, "there is no 'x_blocks' with its weights: is a file"),
        ({"x_blocks": bytes_of(2, 16), "x_scales": F32}, None, "'x_scales' are F32, not U8"),
        ({"x_blocks": bytes_of(2, 8), "x_scales": bytes_of(2)}, None, r"is \[2, 8\] with scales"),
        ({"x_blocks": bytes_of(2, 16), "x_scales": bytes_of(3)}, None, r"16\] with scales \[3\]"),
        ({"x_blocks": bytes_of(16), "x_scales": bytes_of(1)}, None, r"is \[16\] with scales \[1\]"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, arrays: Arrays, block: Block | None, words: str
) -> None:
    checkpoint = stored(tmp_path, {name: np.asarray(array) for name, array in arrays.items()})
    with pytest.raises(CheckpointError, match=words) as caught:
        decode_scaled(checkpoint, block)
    assert str(caught.value).startswith(f"{tmp_path}: tensor ")
    assert "\n" not in str(caught.value)


# What config.json says.


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"quant_method": "vptq"}, "quantized by vptq, which"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "says version 'gemv', which"),
        ({"quant_method": "awq", "bits": 3}, "quantization_config.bits is '3', expected 4"),
        ({"quant_method": "gptq"}, "quantization_config.bits is missing"),
        ({"quant_method": "gptq", "bits": True}, "bits is 'True', expected 2 or 3 or 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0, expected a size"),
        ({"quant_method": "gptq", "bits": 4, "sym": 1}, "sym is not true or false"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "auto-round", "packing_format": "x:y"}, "says packing_format 'x:y'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": []}}, "groups.a is not a"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}},
            "says sparsity_config",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "says quant_algo 'w4a8_awq'"),
        ({"quant_method": ["x"]}, r"quantized by \['x'\], which"),
        ({}, "quantized by a method without a name, which"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "is not a list of two sizes above 0"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "not a list of two sizes above 0"),
        ({"quant_method": "fp8", "weight_block_size": [1, 2, 3]}, "not a list of two sizes"),
        ({"quant_method": "fp8", "weight_block_size": [True, 1]}, "not a list of two sizes"),
    ],
)
def test_other_methods_are_refused(tmp_path: Path, table: Any, words: str) -> None:
    checkpoint = stored(tmp_path, {"x": F32})
    with pytest.raises(CheckpointError, match=words) as caught:
        decode_quantized(checkpoint, QuantSettings(table, Path("folder/config.json")))
    assert str(caught.value).startswith("folder/config.json: quantization_config")
    assert "\n" not in str(caught.value)
    if "which" in words:
        assert str(caught.value).endswith(": use the original weights, or the model as GGUF")

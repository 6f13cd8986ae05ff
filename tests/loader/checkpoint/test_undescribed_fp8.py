"""FP8 where nothing says how weights are quantized: scales by their shape, or refused."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jinfer.loader.checkpoint import CheckpointError
from jinfer.loader.checkpoint.layouts.module_tensors import QuantSettings
from jinfer.loader.checkpoint.layouts.quant_layouts import decode_quantized
from tests.loader.checkpoint.test_scaled_layouts import Arrays, bytes_of, decoded, e4m3, stored

E4M3 = ml_dtypes.float8_e4m3fn
SHAPE = (200, 300)
CODES = bytes_of(*SHAPE) & 0xF7  # no NaN
NUMBERS = np.vectorize(e4m3)(CODES)


def scales_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).uniform(0.1, 2, shape).astype(np.float32)


def with_scales(leaf: str, scales: np.ndarray) -> Arrays:
    return {"a.weight": CODES.view(E4M3), f"a.{leaf}": scales, "norm.scale": np.ones(3, np.float32)}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (200,), (200, 1)])
@pytest.mark.parametrize("leaf", ["weight_scale", "scale", "scales", "scale_weight"])
def test_one_scale_or_one_of_each_row(tmp_path: Path, leaf: str, shape: tuple[int, ...]) -> None:
    scales = scales_of(*shape)
    got = decoded(tmp_path, with_scales(leaf, scales))
    assert list(got) == ["norm.scale", "a.weight"]
    expected = NUMBERS.astype(np.float32) * scales.reshape(-1, 1)
    np.testing.assert_array_equal(got["a.weight"], expected)


def test_scale_of_one_in_weight_scale_inv(tmp_path: Path) -> None:
    scale = scales_of(1)
    got = decoded(tmp_path, with_scales("weight_scale_inv", scale))
    np.testing.assert_array_equal(got["a.weight"], NUMBERS.astype(np.float32) * scale)


def test_blocks_of_128_in_weight_scale_inv(tmp_path: Path) -> None:
    scales = scales_of(2, 3)
    got = decoded(tmp_path, with_scales("weight_scale_inv", scales))
    each = np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[:200, :300]
    np.testing.assert_array_equal(got["a.weight"], NUMBERS.astype(np.float32) * each)


def test_e5m2_of_a_stack_with_rows(tmp_path: Path) -> None:
    numbers = np.random.default_rng(2).normal(0, 1, (3, 4, 5)).astype(ml_dtypes.float8_e5m2)
    scales = scales_of(3, 4, 1)
    got = decoded(tmp_path, {"a.weight": numbers, "a.weight_scale": scales})
    np.testing.assert_array_equal(got["a.weight"], numbers.astype(np.float32) * scales)


def test_scales_of_activations_and_the_mark_of_such_files_are_left_out(tmp_path: Path) -> None:
    more = {"a.scale_input": scales_of(1), "scaled_fp8": np.zeros(2, E4M3)}
    got = decoded(tmp_path, with_scales("scale_weight", scales_of(1)) | more)
    assert list(got) == ["norm.scale", "a.weight"]


@pytest.mark.parametrize(
    ("leaf", "shape"),
    [
        ("weight_scale", (2, 3)),
        ("scale", (200, 10)),
        ("scales", (300,)),
        ("scale_weight", (1, 300)),
        ("weight_scale_inv", (4, 5)),
    ],
)
def test_other_shapes_are_refused_with_advice_that_works(
    tmp_path: Path, leaf: str, shape: tuple[int, ...]
) -> None:
    checkpoint = stored(tmp_path, with_scales(leaf, scales_of(*shape)))
    with pytest.raises(CheckpointError) as caught:
        decode_quantized(checkpoint, None)
    text = str(caught.value)
    assert f"tensor 'a.{leaf}': is {list(shape)} for [200, 300], and nothing says what for" in text
    assert "ignore" not in text
    assert '{"quant_method": "fp8", "weight_block_size": [rows, columns]}' in text


def test_the_advice_reads_blocks(tmp_path: Path) -> None:
    scales = scales_of(2, 3)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    checkpoint = stored(tmp_path, with_scales("weight_scale", scales))
    tensor = decode_quantized(checkpoint, QuantSettings(settings, tmp_path)).tensors["a.weight"]
    each = np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[:200, :300]
    np.testing.assert_array_equal(tensor.read(), NUMBERS.astype(np.float32) * each)


def test_scales_by_other_names_are_refused(tmp_path: Path) -> None:
    checkpoint = stored(tmp_path, with_scales("weight_scaling", scales_of(1)))
    with pytest.raises(CheckpointError, match=r"'a.weight_scaling': is next to weights in FP8"):
        decode_quantized(checkpoint, None)


def test_a_matrix_without_scales_among_others_is_refused(tmp_path: Path) -> None:
    arrays = with_scales("weight_scale", scales_of(1)) | {"b.weight": CODES.view(E4M3)}
    with pytest.raises(CheckpointError, match=r"'b\.weight': there is no 'b\.weight_scale_inv'"):
        decode_quantized(stored(tmp_path, arrays), None)


@pytest.mark.parametrize("kind", [E4M3, ml_dtypes.float8_e5m2])
def test_without_any_scales_numbers_are_taken_as_they_are(tmp_path: Path, kind: type) -> None:
    numbers: np.ndarray = np.random.default_rng(3).normal(0, 1, (4, 5)).astype(kind)
    got = decoded(tmp_path, {"a.weight": numbers, "norm.scale": np.ones(3, np.float32)})
    np.testing.assert_array_equal(got["a.weight"].astype(np.float32), numbers.astype(np.float32))

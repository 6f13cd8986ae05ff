"""Weights that are NaN or infinite, and FP8 without scales: a line; an error where they vanish."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jinfer import LLM
from jinfer.loader.checkpoint.checkpoint_reader import DTYPES
from jinfer.loader.weights.read_parameter import count_nonfinite
from jinfer.loader.weights.tensor_mapping import LoadError

GOLDENS = Path(__file__).parents[2] / "goldens"
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
FLOATS = [np.dtype(kind) for kind in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)]
FLOATS += [np.dtype(kind) for kind in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]

type Arrays = dict[str, np.ndarray]


@pytest.mark.parametrize("kind", FLOATS, ids=str)
def test_every_code_of_up_to_16_bits(kind: np.dtype) -> None:
    """Against NumPy's `isfinite`; of wider types the codes around the limits."""
    unsigned, bits = np.dtype(f"u{kind.itemsize}"), 8 * kind.itemsize
    codes = np.arange(1 << min(bits, 16), dtype=np.uint64) << np.uint64(max(0, bits - 16))
    codes = np.concatenate([codes, codes - np.uint64(1), codes + np.uint64(1)]).astype(unsigned)
    values = codes.view(kind)
    with np.errstate(invalid="ignore"):
        wrong = ~np.isfinite(values.astype(np.float64))
    assert count_nonfinite(values) == np.count_nonzero(wrong)
    assert count_nonfinite(values[~wrong]) == 0
    each = [count_nonfinite(values[i : i + 1]) for i in np.flatnonzero(wrong)[:500]]
    assert each == [1] * len(each)


def test_integers_and_long_and_strided_arrays() -> None:
    assert count_nonfinite(np.full(9, -1, np.int16)) == 0
    assert count_nonfinite(np.zeros((0, 3), np.float32)) == 0
    values = np.zeros((1 << 20, 2), np.float32)
    values[[0, 7, -1], 1] = np.nan, -np.inf, np.inf
    assert [
        count_nonfinite(values),
        count_nonfinite(values[:, 1]),
        count_nonfinite(values[:, 0]),
    ] == [*(3, 3, 0)]


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the golden whose tensors some function has changed."""

    def copy(change: Callable[[Arrays], None]) -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(GOLDENS / "llama2", folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return copy


def broken(*names: str) -> Callable[[Arrays], None]:
    def change(tensors: Arrays) -> None:
        for name in names:
            tensors[name] = tensors[name].copy()
            tensors[name].flat[[1, 5, 6]] = np.nan, np.inf, -np.inf

    return change


def load(folder: Path, **overrides: Any) -> None:
    LLM(folder, **overrides).close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_line_names_the_tensor_and_how_many(
    changed: Callable[..., Path], capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    folder = changed(broken(DOWN))
    load(folder, dtype=dtype)
    output = capsys.readouterr().err
    assert output.startswith(
        f"jinfer: {folder}: {DOWN} has 3 numbers that are NaN or infinite: get"
    )
    assert output.count("\n") == 1


def test_several_tensors_are_one_line(
    changed: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    load(changed(broken(DOWN, NORM)), dtype="float32")
    output = capsys.readouterr().err
    assert (
        f"{NORM} has 3 numbers that are NaN or infinite, and so have 1 other parameters" in output
    )
    assert output.count("\n") == 1


@pytest.mark.parametrize("method", ["rtn", "mse", "gptq"])
def test_nonfinite_weights_cannot_be_quantized(changed: Callable[..., Path], method: str) -> None:
    folder = changed(broken(DOWN))
    settings: dict[str, Any] = {"quantization.weights": "q4", "quantization.method": method}
    settings["quantization.threshold"] = 0
    with pytest.raises(LoadError) as caught:
        load(folder, **settings)
    text = str(caught.value)
    assert text.startswith(f"{folder}: {DOWN} has 3 numbers that are NaN or infinite, which cannot")
    assert text.endswith('[{ match = "decoder.1.ffn.down.weight", weights = "plain" }]')


def test_advice_of_the_nonfinite_error_loads(
    changed: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rules = [{"match": "decoder.1.ffn.down.weight", "weights": "plain"}]
    load(changed(broken(DOWN)), **{"quantization.weights": "q4", "quantization.rules": rules})
    assert f"{DOWN} has 3 numbers" in capsys.readouterr().err


def test_scales_of_gguf_blocks_that_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One scale of a Q8_0 block is NaN: its 32 weights are."""
    folder = tmp_path / "copy"
    shutil.copytree(GOLDENS / "gguf_llama_mixed", folder)
    (path,) = folder.glob("*.gguf")
    reader = gguf.GGUFReader(path, "r+")
    tensor = next(each for each in reader.tensors if each.tensor_type.name == "Q8_0")
    tensor.data.reshape(-1, 34)[2, :2] = np.array([np.nan], np.float16).view(np.uint8)
    reader.data.flush()
    load(path)
    output = capsys.readouterr().err
    assert f"{tensor.name} has 32 numbers that are NaN or infinite" in output


def test_numbers_too_large_for_the_type_of_the_computation(
    changed: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def change(tensors: Arrays) -> None:
        tensors[DOWN] = np.full_like(tensors[DOWN], 1e5, np.float32)

    load(changed(change), dtype="float16")
    output = capsys.readouterr().err
    assert "decoder.1.ffn.down.weight has numbers that are infinite in the type" in output


def test_finite_weights_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    load(GOLDENS / "llama2")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
def test_fp8_without_scales_is_one_line(
    changed: Callable[..., Path], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    largest = {}

    def change(tensors: Arrays) -> None:
        for name in [name for name in tensors if "_proj" in name]:
            tensors[name] = tensors[name].astype(DTYPES[kind])
            largest[name] = float(np.abs(tensors[name].astype(np.float32)).max())

    folder = changed(change)
    load(folder, dtype="float32")
    output = capsys.readouterr().err
    assert output.startswith(
        f"jinfer: {folder}: {len(largest)} tensors in {kind} have no scales, and"
    )
    name = output.partition("are loaded without: ")[2].partition(" first, up to ")[0]
    assert f" first, up to {largest[name]:g}; if they need scales, " in output
    assert output.count("\n") == 1

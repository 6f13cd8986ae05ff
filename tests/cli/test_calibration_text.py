"""tools/quantize --calibration: what is read of a text, and what it is good for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM
from jinfer.cli.quantize import quantize_checkpoint as quantize
from jinfer.cli.quantize.importance_matrix import text_windows
from jinfer.cli.quantize.quantize_checkpoint import main
from jinfer.engine.requests import RequestError
from jinfer.loader.open_model import Opened, open_model

GOLDENS = Path(__file__).parents[1] / "goldens"
MODEL = GOLDENS / "gguf_llama2" / "model.gguf"
TEXT = "the quick brown fox jumps over a lazy dog and runs away from it. " * 10


class Letters:
    """A token for each character: the golden files' tokenizers know no words."""

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))


@pytest.fixture
def opened() -> Opened:
    found = open_model(MODEL, {})
    object.__setattr__(found, "tokenizer", Letters())
    return found


def test_windows_of_a_text(opened: Opened) -> None:
    """Of 640 letters ten are read once more, each as the first of a text."""
    windows, firsts = text_windows(opened, TEXT, 1 << 20, 128)
    ids = np.array(list(map(ord, TEXT[:640])))
    np.testing.assert_array_equal(windows, ids.reshape(5, 128))
    np.testing.assert_array_equal(firsts, ids[::64, None])
    (windows,) = text_windows(opened, TEXT, 200, 64)
    np.testing.assert_array_equal(windows, ids[:192].reshape(3, 64))


def test_texts_that_cannot_be_read(opened: Opened) -> None:
    with pytest.raises(RequestError, match="shorter than a window"):
        text_windows(opened, "the quick", 1 << 20)
    object.__setattr__(opened, "tokenizer", None)
    with pytest.raises(RequestError, match="has no tokenizer"):
        text_windows(opened, TEXT, 1 << 20)
    with pytest.raises(RequestError, match="an encoder or a decoder alone"):
        text_windows(open_model(GOLDENS / "t5", {}), TEXT, 1 << 20)


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is quantized has a tokenizer."""

    def with_letters(*given: Any) -> Any:
        found = open_model(*given)
        object.__setattr__(found, "tokenizer", Letters())
        return found

    monkeypatch.setattr(quantize, "open_model", with_letters)


def error_of(folder: Path, *more: str) -> float:
    """The mean square of what logits are off by, weights quantized with these options."""
    (folder / "text").write_text(TEXT)
    out = folder / f"out{len(list(folder.iterdir()))}"
    small = ("--weights", "q3", "--set", "quantization.threshold=0", "--set", "dtype=float32")
    assert main([str(MODEL), str(out), *small, *more]) == 0
    settings: dict[str, Any] = {"quantization.weights": "plain", "dtype": "float32"}
    ids = list(map(ord, TEXT))[100:200]
    expected = LLM(MODEL, **settings).logits([ids])[0]
    return float(np.square(LLM(out).logits([ids])[0] - expected).mean())


@pytest.mark.usefixtures("letters")
def test_a_text_decides_what_a_search_finds(tmp_path: Path) -> None:
    search = ("--method", "mse")
    assert error_of(tmp_path, *search, "--calibration", str(tmp_path / "text")) != error_of(
        tmp_path, *search
    )


@pytest.mark.soak
@pytest.mark.usefixtures("letters")
def test_calibrated_weights_give_nearer_results(tmp_path: Path) -> None:
    searched = error_of(tmp_path, "--method", "mse")
    feedback = ("--method", "gptq", "--tokens", "4096")
    assert error_of(tmp_path, *feedback) < searched
    by_text = error_of(tmp_path, *feedback, "--calibration", str(tmp_path / "text"))
    assert by_text < 0.9 * searched


def test_a_text_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"\xff\xfe\x00")
    out = tmp_path / "out"
    options = ("--weights", "q4", "--set", "quantization.threshold=0", "--calibration", text)
    assert main([str(item) for item in (MODEL, out, *options)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not out.exists()

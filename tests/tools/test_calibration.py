"""tools/quantize --calibration: what is learnt from a text, and what it is good for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM
from jinfer.quant.calibration import Kind
from tools import calibration
from tools.calibration import collect_inputs
from tools.quantize import main

GOLDENS = Path(__file__).parents[1] / "goldens"
MODEL = GOLDENS / "gguf_llama2" / "model.gguf"
TEXT = "the quick brown fox jumps over a lazy dog and runs away from it. " * 10


def _ids(_: LLM, text: Any) -> list[int]:
    return [ord(each) if isinstance(each, str) else each for each in text]


@pytest.fixture(autouse=True)
def _letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token for each character: the golden files' tokenizers know no words."""
    monkeypatch.setattr(LLM, "encode", _ids)


@pytest.fixture(scope="module")
def plain() -> LLM:
    settings: dict[str, Any] = {"quantization.weights": "plain", "dtype": "float32"}
    return LLM(MODEL, **settings)


def test_the_inputs_of_weights(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: dict[str, Kind] = {
        "decoder.0.attn.q.weight": "products",
        "decoder.0.attn.k.weight": "squares",
        "logits.weight": "squares",
        "embed.weight": "squares",
    }
    found = collect_inputs(plain, TEXT, kinds, length=64, most=200)
    assert found.keys() == kinds.keys() - {"embed.weight"}, "a table is not multiplied with"
    q, k, logits = (found[name] for name in kinds if name in found)
    assert (q.rows, k.rows, logits.rows) == (192, 192, 192)
    np.testing.assert_allclose(q.importance, k.importance, rtol=1e-4)
    ids = plain.encode(TEXT)[:192]
    hidden = np.concatenate(plain.hidden([ids[i : i + 64] for i in range(0, 192, 64)]))
    np.testing.assert_allclose(logits.importance, (hidden**2).mean(axis=0), rtol=1e-3)
    # Read once more for each group of sums that fits into memory.
    monkeypatch.setattr(calibration, "_MOST_SUMS", 20_000)
    again = collect_inputs(plain, TEXT, kinds, length=64, most=200)
    for name, inputs in found.items():
        np.testing.assert_allclose(again[name].mean, inputs.mean, rtol=1e-4, atol=1e-6)


def test_experts_that_no_token_chose() -> None:
    llm = LLM(GOLDENS / "mixtral", dtype="float32")
    names = [name for name in llm._engine.model.names if ".experts." in name or "ffn.up" in name]
    found = collect_inputs(llm, "aa", dict.fromkeys(names, "products"), length=2)
    stacks = [each for each in found.values() if each.rows.ndim]
    assert stacks
    for inputs in stacks:
        unmet = inputs.mean[inputs.rows == 0]
        assert len(unmet)
        assert (unmet == np.eye(unmet.shape[-1])).all()


def test_calibrated_weights_give_nearer_results(plain: LLM, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    small = ("--weights", "q2", "--set", "quantization.threshold=0", "--set", "dtype=float32")
    ids = plain.encode(TEXT)[100:200]
    wanted = plain.logits([ids])[0]
    errors = list[float]()
    for more in ((), ("--method", "feedback"), ("--calibration", text, "--method", "feedback")):
        out = tmp_path / f"out{len(errors)}"
        assert main([str(each) for each in (MODEL, out, *small, *more)]) == 0
        errors.append(float(np.square(LLM(out).logits([ids])[0] - wanted).mean()))
    searched, by_chance, by_text = errors
    assert by_chance < 0.9 * searched
    assert by_text < 0.9 * searched


def test_first_tokens_count_more(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 640 tokens ten are read once more, each as the first of a text."""
    kinds: dict[str, Kind] = {"decoder.1.attn.q.weight": "products", "logits.weight": "squares"}
    found = collect_inputs(plain, TEXT, kinds, length=128)
    ids: Any = plain.encode(TEXT)[:640:64]
    firsts = collect_inputs(plain, ids, kinds, length=1)
    monkeypatch.setattr(calibration, "_FIRST", 640)  # windows are short then: nothing is added
    windows = collect_inputs(plain, TEXT[:640], kinds, length=128)
    for name, inputs in found.items():
        assert (inputs.rows, firsts[name].rows, windows[name].rows) == (650, 10, 640)
        mean = (windows[name].mean * 640 + firsts[name].mean * 10) / 650
        np.testing.assert_allclose(inputs.mean, mean, rtol=1e-3, atol=1e-5)


def test_tokens_by_chance(plain: LLM) -> None:
    """Those of the whole vocabulary, as many as were asked for, in whole batches of 8 x 64."""
    kinds: dict[str, Kind] = {"decoder.0.attn.q.weight": "products"}
    (found,) = collect_inputs(plain, None, kinds, most=1000).values()
    assert found.rows == 512
    ids: Any = np.random.default_rng(0).integers(0, plain.spec.dims["vocab"], 512).tolist()
    (wanted,) = collect_inputs(plain, ids, kinds, length=64).values()
    np.testing.assert_allclose(found.mean, wanted.mean, rtol=1e-4, atol=1e-5)


def test_a_text_that_is_too_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("the quick")
    out = tmp_path / "out"
    options = ("--weights", "q4", "--set", "quantization.threshold=0", "--calibration", text)
    assert main([str(each) for each in (MODEL, out, *options)]) == 2
    assert "the calibration text is shorter than a window" in capsys.readouterr().err
    text.write_bytes(b"\xff\xfe\x00")
    assert main([str(each) for each in (MODEL, out, *options)]) == 2
    assert not out.exists()

"""jinfer.cli.quality: a row for each way to store weights, beside the model in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer import LLM
from jinfer.cli.bench import bench_figures
from jinfer.cli.quality import divergence, main

MODEL = Path(__file__).parents[1] / "goldens" / "gguf_llama2" / "model.gguf"
SMALL = ("--length", "32", "--windows", "3", "--method", "mse", "--weights", "q2",
         "--weights", "q8")  # fmt: skip


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A token for each character: the golden file's tokenizer knows no words."""

    def ids(_: LLM, text: Any) -> list[int]:
        return [ord(item) if isinstance(item, str) else item for item in text]

    monkeypatch.setattr(LLM, "encode", ids)
    file = tmp_path / "text"
    file.write_text("the quick brown fox jumps over a lazy dog and runs away from it. " * 3)
    return file


def test_the_rows(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, drawing = tmp_path / "report.json", tmp_path / "drawing.svg"
    more = ("--kv-cache", "q8", "--json", str(report), "--svg", str(drawing))
    assert main([str(MODEL), "--text", str(text), *SMALL, *more]) == 0
    rows: dict[str, Any] = {row["name"]: row for row in json.loads(report.read_text())["rows"]}
    assert list(rows) == ["f32", "q2 mse", "q8 mse", "f32 cache q8"]
    f32, q2, q8, cache = rows.values()
    assert (f32["bits"], f32["divergence"], f32["agreement"]) == (32, 0, 1)
    assert q2["rmse"] > 10 * q8["rmse"] > 0
    assert q2["divergence"] > 10 * q8["divergence"] > 0
    assert q2["bits"] < q8["bits"] < 16
    assert cache["rmse"] == 0 < cache["divergence"]
    for row in (q8, cache):
        assert row["perplexity"] == pytest.approx(f32["perplexity"], rel=0.02)
    printed = capsys.readouterr().out
    assert all(f"| jinfer | {name} |" in printed for name in rows)
    assert drawing.read_text().startswith("<?xml")


def test_divergence() -> None:
    expected = np.log([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]])
    assert divergence(expected + 3, expected) == (pytest.approx(0), 1)
    given = np.log([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]])
    apart = (0.5 * np.log(2) + 0.25 * np.log(0.5)) / 2
    assert divergence(given, expected) == (pytest.approx(apart), 0.5)


def test_what_is_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_figures, "find_spec", lambda name: None)
    cases = {
        (MODEL, "--text", tmp_path / "no"): "No such file",
        (tmp_path / "no.gguf", "--text", text): "there is no such file or folder",
        (MODEL, "--text", text, *SMALL, "--weights", "q7"): "no quantization format",
        (MODEL, "--text", text, "--svg", tmp_path / "a.svg"): "pip install 'jinfer[plots]'",
        (MODEL, "--text", text, "--json", tmp_path / "no" / "a.json"): "there is no folder",
        (MODEL, "--text", text, "--json", tmp_path): "is a folder",
    }
    for arguments, words in cases.items():
        assert main([str(argument) for argument in arguments]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert len(errors) == 1
        assert words in errors[0]

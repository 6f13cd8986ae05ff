"""The benchmark of adapters, on a tiny model: it runs; speed is no test."""

import json
from pathlib import Path

import pytest

from tools import bench_lora

GOLDENS = Path(__file__).parents[1] / "goldens"
MODEL = GOLDENS / "gguf_llama2" / "model.gguf"


def test_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.json"
    arguments = ["--adapters", "2", "--rank", "4", "--streams", "3", "--tokens", "4"]
    arguments += ["--rounds", "1", "--set", "engine.context=64", "--json", str(file)]
    assert bench_lora.main([str(MODEL), *arguments]) == 0
    assert capsys.readouterr().out.startswith(" 3 streams: ")
    (found,) = json.loads(file.read_text())
    for name in ("unused", "used"):
        expected = found["rates"][name] / found["rates"]["plain"]
        assert found[name]["ratio"] == pytest.approx(expected)


def test_another_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_lora.main([str(GOLDENS / "llama2")]) == 2
    assert "is no GGUF file; write one with tools/bench_models.py" in capsys.readouterr().err

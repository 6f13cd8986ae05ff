"""The benchmark of streams, on a tiny model: it runs, and what it counts is right."""

import json
from pathlib import Path
from typing import Any

import pytest

from jinfer import LLM
from jinfer.cli.bench import bench_engine

GOLDEN = Path(__file__).parents[1] / "goldens" / "llama2"


def test_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(bench_engine, "_LONG", 150)
    monkeypatch.setattr(bench_engine, "_COMMON", 100)

    def small(source: Any, **keys: Any) -> Any:
        changes = {"engine.context": 256, "engine.slots": 4, "engine.warm_up": False}
        return LLM(source, **{**keys, **changes})

    monkeypatch.setattr(bench_engine, "LLM", small)
    files = {"--svg": tmp_path / "a.svg", "--json": tmp_path / "a.json"}
    options = [str(part) for pair in files.items() for part in pair]
    arguments = [str(GOLDEN), "--rounds", "1", "--tokens", "40", *options]
    assert bench_engine.main(arguments) == 0
    assert "longest gap while the prompt is computed" in capsys.readouterr().out
    record = json.loads(files["--json"].read_text())
    shared = record["shared"]
    assert shared["prompt_tokens"] == 16 * 120
    assert shared["computed"] < 600  # the beginning once, 20 tokens of each, and some edges
    assert record["gaps"][0]["usual"] > 0
    assert record["gaps"][0]["longest"] > 0
    assert files["--svg"].read_text().startswith("<?xml")


def test_a_source_that_is_not_there(capsys: Any) -> None:
    assert bench_engine.main(["nowhere.toml"]) == 2
    assert capsys.readouterr().err.startswith("error: ")

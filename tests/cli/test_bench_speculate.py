"""The benchmark of drafts, on a tiny model: it runs, and what it counts is right."""

import json
from pathlib import Path
from typing import Any

import pytest

from jinfer.cli.bench import bench_speculate

STORIES = Path(__file__).parents[1] / "goldens" / "stories260K"


def test_it_measures(tmp_path: Path, capsys: Any) -> None:
    file, picture = tmp_path / "a.json", tmp_path / "a.svg"
    arguments = ["--accuracy", "0", "1", "--nodes", "4", "--tokens", "61", "--rounds", "1"]
    arguments += ["--json", str(file)]
    assert bench_speculate.main([str(STORIES), *arguments, "--svg", str(picture)]) == 0
    assert "| replay, 1.0, 4 nodes | 1 | 4.00 | 4.00 | 1.00 |" in capsys.readouterr().out
    wrong, right = json.loads(file.read_text())
    assert (wrong["accepted"], right["accepted"]) == (0, 45)
    assert wrong["formula"] == pytest.approx(1.0)
    assert len(right["ratios"]) == 1
    assert "chance that a drafted token is right" in picture.read_text()


def test_a_source_that_is_not_there(capsys: Any) -> None:
    assert bench_speculate.main(["nowhere.toml"]) == 2
    assert capsys.readouterr().err.startswith("error: ")

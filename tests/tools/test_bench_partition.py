"""tools.bench_partition: measured splits."""

import json
from pathlib import Path

import pytest

from tools.bench_partition import main

GOLDENS = Path(__file__).parents[1] / "goldens"


def test_a_split_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"--svg": tmp_path / "busy.svg", "--json": tmp_path / "all.json"}
    options = [str(part) for pair in files.items() for part in pair]
    given = [str(GOLDENS / "llama2"), "--requests", "2", "--tokens", "3", *options]
    assert main([*given, "--devices", "0", "--set", "dtype=float32"]) == 0
    assert "no speed is reported" in capsys.readouterr().out
    (found,) = json.loads(files["--json"].read_text())
    assert (found["devices"], found["exchanges"], found["moved"]) == ("0", 0, 0)
    assert found["latency"] > 0
    assert "stage 0" in files["--svg"].read_text()

"""tools.bench_partition: splits that are measured, and predictions of the cost model."""

import json
import re
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


def test_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--predict"]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("| Llama-2-70B"))
    # On 24 GB at 16 bits it takes eight devices.
    assert row.startswith("| Llama-2-70B | - | - | - | 1x8")
    page = (GOLDENS.parents[1] / "docs" / "partition.md").read_text(encoding="utf-8")
    told = [line for line in out.splitlines() if re.match(r"\| (Llama|Mixtral|Yi|Falcon)", line)]
    assert sum(line in page for line in told) == 6  # those of one machine


def test_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err == "error: name a source, or give --predict\n"

"""`inspect --partition` and `bench partition`: what they say is so."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import bench_partition, inspect

GOLDENS = Path(__file__).parents[1] / "goldens"


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert inspect.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_a_plan_for_devices_that_are_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "plan.svg"
    out = printed(capsys, GOLDENS / "llama2", "--partition", "0&1;2&3", "--svg", picture)
    told, memory = out.split("\nmemory")
    rows = re.findall(r"^(device \d) +(.+?)  +[\d.]+ KiB +[\d.]+ KiB +(.+)$", told, re.MULTILINE)
    assert re.findall(r"^device \d", memory, re.MULTILINE) == [row[0] for row in rows]
    assert [row[0] for row in rows] == ["device 0", "device 1", "device 2", "device 3"]
    assert rows[0][1:] == rows[1][1:] == ("embedding + decoder 0-1", "5 sums")
    assert rows[2][1:] == ("decoder 2 + head", "2 sums, 1 gather")
    assert "256 B a token go from stage to stage" in out
    drawn = "".join(ElementTree.parse(picture).getroot().itertext())
    assert "device 3" in drawn
    assert "stage 1" in drawn


def test_an_encoder_and_a_stage_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, GOLDENS / "bert", "--partition", "cpu;0&1", "--on", "v100")
    assert re.search(r"^cpu +embedding \+ encoder 0", out, re.MULTILINE)
    assert "estimate for v100" in out


def test_a_plan_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main([str(GOLDENS / "olmo2"), "--partition", "0&1"]) == 2
    error = capsys.readouterr().err
    assert "its norm of queries and keys is over all heads together" in error
    assert error.count("\n") == 1
    assert inspect.main([str(GOLDENS / "llama2"), "--partition", "0&1&2&3&4&5"]) == 2
    assert "4 heads cannot be divided among 6 devices" in capsys.readouterr().err


def test_a_split_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"--svg": tmp_path / "busy.svg", "--json": tmp_path / "all.json"}
    options = [str(part) for pair in files.items() for part in pair]
    given = [str(GOLDENS / "llama2"), "--requests", "2", "--tokens", "3", *options]
    assert bench_partition.main([*given, "--devices", "0", "--set", "dtype=float32"]) == 0
    assert "no speed is said" in capsys.readouterr().out
    (found,) = json.loads(files["--json"].read_text())
    assert (found["devices"], found["exchanges"], found["moved"]) == ("0", 0, 0)
    assert found["latency"] > 0
    assert "stage 0" in files["--svg"].read_text()


def test_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_partition.main(["--predict"]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("| Llama-2-70B"))
    # On 24 GB at 16 bits it takes eight devices.
    assert row.startswith("| Llama-2-70B | - | - | - | 1x8")
    page = (GOLDENS.parents[1] / "docs" / "partition.md").read_text(encoding="utf-8")
    told = [line for line in out.splitlines() if re.match(r"\| (Llama|Mixtral|Yi|Falcon)", line)]
    assert sum(line in page for line in told) == 4 * 6  # all but those of the largest machines


def test_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_partition.main([]) == 2
    assert capsys.readouterr().err == "error: a source is needed, or --predict or --memory\n"

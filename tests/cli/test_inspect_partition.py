"""`jinfer inspect --partition`: shards of the devices, and plans that are refused."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jinfer.cli.inspect.inspect_checkpoint import main

GOLDENS = Path(__file__).parents[1] / "goldens"


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
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


def test_a_cache_on_a_gpu_has_no_int8_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever this machine's CPU has: keys and values of 3 layers, 4 heads, 16 numbers each."""
    given = [GOLDENS / "llama2", "--partition", "0", "--set", "quantization.kv_cache=f16"]
    cache = 256 * 3 * 4 * (16 + 16) * 2 / 1024
    assert f" {cache:.2f} KiB  nothing" in printed(capsys, *given)


def test_an_encoder_and_a_stage_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, GOLDENS / "bert", "--partition", "cpu;0&1", "--on", "v100")
    assert re.search(r"^cpu +embedding \+ encoder 0", out, re.MULTILINE)
    assert "estimate for v100" in out


def test_a_plan_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(GOLDENS / "olmo2"), "--partition", "0&1"]) == 2
    error = capsys.readouterr().err
    assert "its norm is over all heads together" in error
    assert error.count("\n") == 1
    assert main([str(GOLDENS / "llama2"), "--partition", "0&1&2&3&4&5"]) == 2
    assert "4 heads cannot be divided among 6 devices" in capsys.readouterr().err

"""`inspect --partition` and `bench partition`: what they say is so."""

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from jinfer.parallel.cost_model import ModelCost
from tools import bench_partition, inspect
from tools.bench_process_splits import SplitJob, compare, predict

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
    assert inspect.main([str(GOLDENS / "olmo2"), "--partition", "0&1"]) == 2
    error = capsys.readouterr().err
    assert "its norm is over all heads together" in error
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
    shown = re.findall(r"^\| (?:Llama|Mixtral|Yi|Falcon).*", page, re.MULTILINE)
    assert len(shown) == 6
    assert [line for line in shown if line not in out] == []


def test_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_partition.main([]) == 2
    assert capsys.readouterr().err == "error: a source is needed, or --predict or --memory\n"


# Answers as a worker does, of figures that are known; a job of two takes 1.25 times as long.
WORKER = """
import json, sys
job = "--coordinator" in sys.argv
found = {"read": 5e9, "flops": 1e12}
if job:
    found |= {"together": 8e9, "sums": [1e9, 1e-4], "passes": [1e12, 1e-3]}
print("starting", json.dumps(found), json.dumps({"seconds": 1}), sep="\\n", flush=True)
for line in sys.stdin:
    task, rows = line.split()
    assert task == "decode"
    print(json.dumps({"rate": int(rows) * (8 if job else 10)}), flush=True)
"""


def test_a_report_of_splits_over_processes(tmp_path: Path) -> None:
    """What is predicted stands beside what is measured, by workers whose figures are known."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("each process needs a core of its own")
    script, report = tmp_path / "worker.py", tmp_path / "report.json"
    script.write_text(WORKER)
    model = str(GOLDENS / "gguf_llama2" / "model.gguf")
    options = argparse.Namespace(source=model, processes=2, requests=2, rounds=1, json=str(report))
    keys = {"engine.slots": 2, "engine.context": 256}
    out = compare(options, keys, [str(script)])
    assert re.search(r"^one process with \d+ cores reads 5\.0 GB/s of weights; with ", out, re.M)
    assert re.search(r"^a sum after a product among processes takes 200 µs", out, re.M)
    row = r'^\| "0[;&]1" \| [12] \| [12]0\.00? \| (?:8|16)\.00? \| 0\.80 .+ \| [+-]\d+% \|$'
    assert len(re.findall(row, out, re.MULTILINE)) == 4, out
    found = json.loads(report.read_text())
    assert [(each["devices"], each["rows"], each["ratio"]) for each in found["splits"]] == [
        ("0;1", 1, 0.8), ("0&1", 1, 0.8), ("0;1", 2, 0.8), ("0&1", 2, 0.8)
    ]  # fmt: skip
    assert found["figures"]["0&1"]["together"] == 8e9


def test_splits_are_of_two_processes_or_more(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(GOLDENS / "gguf_llama2" / "model.gguf")
    assert bench_partition.main([model, "--processes", "1"]) == 2
    assert "at least 2" in capsys.readouterr().err


@pytest.mark.soak
def test_splits_over_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same of real workers, five of which are started and load the model."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("each process needs a core of its own")
    model, report = str(GOLDENS / "gguf_llama2" / "model.gguf"), tmp_path / "report.json"
    given = ["--processes", "2", "--rounds", "1", "--requests", "2", "--json", str(report)]
    assert bench_partition.main([model, *given]) == 0
    out = capfd.readouterr().out
    assert re.search(r"^one process with \d+ cores reads [\d.]+ GB/s of weights; with ", out, re.M)
    assert re.search(r"^a sum after a product among processes takes \d+ µs(, | of any)", out, re.M)
    row = r'^\| "0[;&]1" \| [12] \| [\d.]+ \| [\d.]+ \| .+ \| [\d.]+ \| [+-]\d+% \|$'
    assert len(re.findall(row, out, re.MULTILINE)) == 4
    found = json.loads(report.read_text())
    assert [(each["devices"], each["rows"]) for each in found["splits"]] == [
        ("0;1", 1), ("0&1", 1), ("0;1", 2), ("0&1", 2)
    ]  # fmt: skip
    assert found["figures"]["0&1"]["together"] > 0


def test_a_prediction_follows_from_the_figures() -> None:
    """With figures that are known, by hand: two processes of half of the cores."""
    work = ModelCost(
        1e9, 0.8e9, 0.8e9, layers=10, hidden=4e3, vocab=0, cache=0, kv_heads=8, tables=0.2e9
    )
    none: list[Any] = []
    single = SplitJob("", 1, 1, none, {"read": 8e9, "flops": 1e15}, {1: [1 / 0.11], 8: [8 / 0.15]})
    figures = {"read": 5e9, "flops": 1e15, "together": 8e9, "sums": [1e9, 1e-4]}
    figures["passes"] = [1e12, 1e-3]
    layers = SplitJob("0;1", 2, 1, none, figures)
    tensor = SplitJob("0&1", 1, 2, none, figures)
    halves = [0.5, 0.5]
    # 0.8e9 / 5e9 s of reading, 10 ms that the single process took beside, a vector for each stage.
    assert 1 / predict(single, layers, 1, work, halves) == pytest.approx(0.16 + 0.01 + 0.002)
    # Half of it at half of what both read together, 20 sums of two messages and 4 KB, 4 us, and a
    # message that says where tokens stand.
    sums = 20 * (2e-4 + 4e-6)
    found = 1 / predict(single, tensor, 1, work, [1.0])
    assert found == pytest.approx(0.1 + 0.01 + sums + 1e-4 + 1e-3)
    # Lanes of four: while both stages are busy each reads half of 8e9, and of the 10 to 50 ms
    # between one sequence and eight, four have 10 + 3/7 of 40, half of them in a stage.
    apart = (0.01 + 0.04 * 3 / 7) / 2
    found = 4 / predict(single, layers, 8, work, halves)
    assert found == pytest.approx(0.4e9 / 4e9 + apart + 0.001, rel=1e-3)
    # The larger stage is waited for.
    assert predict(single, layers, 8, work, [0.4, 0.6]) < 4 / found

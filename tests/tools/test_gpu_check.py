"""The checks of `make gpu`, as far as they go without a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tools import bench_offload, gpu_check
from tools.gpu_check import PARTS, CheckPart, check, run_part


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi of one device."""
    said = tmp_path / "nvidia-smi"
    said.write_text("#!/bin/sh\necho 'A Card, 98304'\n")
    said.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_figures_of_each_part_are_written(
    driver: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "part_module.py"
    module.write_text(
        "import json, os, sys\n"
        "json.dump(os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'], open(sys.argv[1], 'w'))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parts = (
        CheckPart("limited", ("part_module", "{json}"), 60, memory=gpu_check.SMALL_CARD),
        CheckPart("absent", ("no_such_module_of_anybody",), 60),
    )
    out = tmp_path / "gpu.json"
    found = check(out, 600, parts)
    assert found == json.loads(out.read_text())
    assert (found["device"], found["memory_mib"]) == ("A Card", 98304)
    assert found["parts"]["limited"]["figures"] == "0.2500"
    assert found["parts"]["limited"]["status"] == 0
    assert found["parts"]["absent"]["status"] == 1
    assert "No module named" in found["parts"]["absent"]["output"][-1]


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    row = run_part(
        CheckPart("slow", ("timeit", "-n1", "-r1", "import time; time.sleep(60)"), 1),
        tmp_path,
        0,
        1,
    )
    assert row["status"] is None
    assert 1 <= row["seconds"] < 30


def test_counts_of_tests_are_read(tmp_path: Path) -> None:
    tests = tmp_path / "test_two.py"
    tests.write_text("def test_one(): pass\ndef test_two(): assert False\n")
    part = CheckPart("tests", ("pytest", "-q", "-rf", "-p", "no:cacheprovider", str(tests)), 60)
    row = run_part(part, tmp_path, 0, 60)
    assert row["tests"] == {"passed": 1, "failed": 1}
    assert row["failed"][0].startswith("FAILED")


def test_without_a_driver_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_check.main([str(tmp_path / "gpu.json")]) == 2
    error = capsys.readouterr().err
    assert "nvidia-smi" in error
    assert error.count("\n") == 1


def test_parts_name_modules_and_files_that_there_are() -> None:
    root = Path(gpu_check.__file__).parents[1]
    for part in PARTS:
        module, *rest = part.command
        if module.startswith("tools."):
            assert (root / f"{module.replace('.', '/')}.py").is_file()
        for word in rest:
            if word.startswith("tests/"):
                assert (root / word).exists()


def test_tables_of_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def programs(*rows: tuple[str, float]) -> dict[str, object]:
        shares = {"of_copy": 0.5, "of_matmul": 0.25}
        item = [{"format": "q4", "task": task, "seconds": s, **shares} for task, s in rows]
        figures = {"copy": 3e12, "matmul": 7e14, "peak_bytes": 3 << 30, "programs": item}
        return {"status": 0, "figures": figures}

    split = {"tokens_per_second": 7.0, "tokens_per_second_together": 20.0}
    split |= {"bytes_in_use": 1 << 20, "equal": True}
    parts = {
        "programs": programs(("decode-1", 0.002), ("prompt-512", 0.1)),
        "yi_34b": programs(("decode-1", 0.01)),
        "offload": {"status": 0, "figures": {"alone": split, "streamed": {"error": "no"}}},
        "kernel_tests": {"status": None, "tests": {"passed": 3}},
    }
    out = tmp_path / "gpu.json"
    out.write_text(json.dumps({"device": "A Card", "parts": parts}))
    assert gpu_check.main([str(out), "--tables"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "### A Card"
    assert "| q4, decode, 1 | 500 | 50% |" in said
    assert "| q4, prompt, 512 | 5,120 | 25% |" in said
    assert "Yi 34B in 3.0 GiB at most: decode-1 100 tokens/s" in said
    assert "| alone | 7.0 | 20.0 | 1 | equal |" in said
    assert said[-2:] == ["kernel_tests: 3 passed", "kernel_tests failed or took too long"]


def test_splits_are_compared_with_the_device_alone(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    goldens: Path,
) -> None:
    rates = {"tokens_per_second": 1.0, "tokens_per_second_together": 2.0, "bytes_in_use": 1 << 20}
    rates["first_answer_seconds"] = 3.0

    def in_a_process(source: str, keys: dict[str, object], dtype: str) -> dict[str, object]:
        if "cpu_layers" in keys:
            return {"error": "no room"}
        return {"tokens": [[1, 2 + ("streamed_layers" in keys)]], **rates}

    monkeypatch.setattr(bench_offload, "in_a_process", in_a_process)
    out = tmp_path / "offload.json"
    assert bench_offload.main([str(goldens / "gguf_llama2"), "--json", str(out)]) == 1
    found = json.loads(out.read_text())
    assert found["device alone"]["equal"]
    assert found["embeddings on the host"]["equal"]
    assert not found["half of the layers streamed"]["equal"]
    assert found["2 layers on the host"] == {"error": "no room"}
    assert "first answer after 3 s, OTHER TOKENS" in capsys.readouterr().out

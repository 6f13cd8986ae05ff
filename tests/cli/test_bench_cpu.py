"""`jinfer bench cpu`: medians of the ratios of rounds, shares of the bandwidth, one-line errors."""

import json
import re
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest

from jinfer.cli.bench import bench_cpu
from jinfer.cli.bench.bench_cpu import main, step_bytes, summary, to_text
from jinfer.loader.checkpoint import open_checkpoint

ROOT = Path(__file__).parents[2]
GOLDENS = Path(__file__).parents[1] / "goldens"
MODEL = GOLDENS / "gguf_llama2" / "model.gguf"
# What measures a tiny model in no time.
SMALL = ("--rounds", "2", "--only", "decode1", "--set", "engine.context=256")


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    found = summary({"jinfer": [2.0, 6.0, 11.0], "llama.cpp": [1.0, 2.0, 10.0]}, "jinfer")
    assert found["rates"] == {"jinfer": 6, "llama.cpp": 2}
    assert found["ratios"] == {"llama.cpp": {"ratio": 2, "least": 1.1, "most": 3}}
    started = {"jinfer": {"seconds": 3.0}, "llama.cpp": {"seconds": 1.0}}
    memory = {"jinfer": {"rss": 5.0}, "llama.cpp": {"rss": 10.0}}
    result = {"model": "a/b.gguf", "started": started, "memory": memory}
    rounds = {"jinfer": [2.0, 6.0, 11.0], "llama.cpp": [1.0, 2.0, 10.0]}
    measured = {"rounds": rounds, "bandwidth": [5_000, 10_000, 15_000]}
    result["tasks"] = {"decode 4": {**found, **measured}, "prefill 64": {**found, "bandwidth": []}}
    bench_cpu.add_shares(result, 1000)
    lines = to_text([result]).splitlines()
    assert "| decode 4 | 6.0 (15%) | 2.0 (5%) | 2.00 (1.10-3.00) |" in lines
    assert "| prefill 64 | 6.0 | 2.0 | 2.00 (1.10-3.00) |" in lines
    assert "| start to first token, s | 3.00 | 1.00 | 3.00 |" in lines
    assert "| peak memory, MiB | 5.00 | 10.00 | 0.50 |" in lines


def test_bytes_of_a_step() -> None:
    """All tensors but a table that is only looked up; with experts nobody knows."""
    untied = open_checkpoint(MODEL).tensors
    assert "output.weight" in untied
    table = untied["token_embd.weight"].nbytes
    assert step_bytes(str(MODEL)) == sum(item.nbytes for item in untied.values()) - table
    tied = open_checkpoint(GOLDENS / "gguf_gemma" / "model.gguf").tensors
    assert "output.weight" not in tied
    whole = sum(item.nbytes for item in tied.values())
    assert step_bytes(str(GOLDENS / "gguf_gemma" / "model.gguf")) == whole
    assert step_bytes(str(GOLDENS / "gguf_mixtral" / "model.gguf")) is None


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="this Python has the peer")
def test_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main([str(MODEL), *SMALL, "--json", str(report)]) == 0
    printed = capfd.readouterr().out
    assert "no comparison: no Python with llama_cpp" in printed
    gives = r"^the memory gives \d+\.\d to \d+\.\d GB/s to \d+ cores$"
    assert re.search(gives, printed, re.MULTILINE)
    assert re.search(r"^\| decode 1 \| \d+\.\d \(\d+%\) \|$", printed, re.MULTILINE)
    assert re.search(r"^\| peak memory, MiB \| \d+\.\d\d \|$", printed, re.MULTILINE)
    found = json.loads(report.read_text())
    (row,) = (result["tasks"]["decode 1"] for result in found["results"])
    assert len(row["bandwidth"]) == 2, "one for each round"
    shares = [
        step_bytes(str(MODEL)) * rate / bandwidth
        for rate, bandwidth in zip(row["rounds"]["jinfer"], row["bandwidth"], strict=True)
    ]
    assert row["shares"] == {"jinfer": pytest.approx(sum(shares) / 2)}


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="this Python has the peer")
def test_beside_another_checkout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The other one's own worker is run, in its folder: here one that is slow by a sure factor."""
    (tmp_path / "old" / "jinfer").mkdir(parents=True)
    (tmp_path / "old" / "jinfer" / "__init__.py").touch()
    (tmp_path / "old" / "jinfer" / "__main__.py").write_text(
        "import os, sys\n"
        f"model, options = {str(MODEL)!r}, {SMALL[-2:]!r}\n"
        "assert sys.argv[1:] == ['bench', 'cpu', '--worker', 'jinfer', model, *options]\n"
        f"assert os.getcwd() == {str(tmp_path / 'old')!r}\n"
        "print('{\"seconds\": 1000}', flush=True)\n"
        "for line in sys.stdin:\n"
        "    print('{\"rate\": 0.001}', flush=True)\n"
        "print('{\"rss\": 1}')\n"
    )
    assert main([str(MODEL), "--only", "sample1", *SMALL, "--beside", str(tmp_path / "old")]) == 0
    printed = capfd.readouterr().out
    assert "left out, because not every engine knows it: sample 1\n" in printed
    assert "| sample 1 |" not in printed
    assert "| | jinfer tokens/s (of the bandwidth) | jinfer in old tokens/s | ratio" in printed
    # A start is measured from outside, whatever a process says of it.
    assert re.search(
        r"^\| start to first token, s \| .* \| \d{1,2}\.\d\d \|", printed, re.MULTILINE
    )
    assert re.search(r"^\| decode 1 \| .* \| 0\.0 \(0%\) \| \d{4,}\.\d\d \(", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.gguf"], "nowhere.gguf: there is no such file"),
        ([str(MODEL), "--beside", str(GOLDENS)], "goldens: is no checkout of jinfer"),
        ([str(GOLDENS / "llama2")], "llama2: is no GGUF file"),
        ([str(MODEL), *SMALL, "--set", "engine.slts=2"], "jinfer ended without an answer"),
    ],
)
def test_what_is_refused(
    arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    errors = capfd.readouterr().err.splitlines()
    assert words in errors[-1]
    assert all(line.startswith("error: ") for line in errors)


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="this Python has the peer")
def test_a_peer_that_is_none(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([str(MODEL), *SMALL, "--peer-python", sys.executable]) == 2
    errors = capfd.readouterr().err.splitlines()
    assert errors[0] == "error: No module named 'llama_cpp'"
    assert "--peer-python has to name a Python with llama-cpp-python" in errors[-1]


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="this Python has the peer")
def test_a_peer_with_a_type_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is measured with what it has made of the model: here ten bytes."""
    (tmp_path / "llama_cpp.py").write_text(
        "from ctypes import Structure\n"
        "LLAMA_FTYPE_MOSTLY_Q4_K_M, llama_log_set, llama_backend_init = 15, print, print\n"
        "llama_model_quantize_default_params = type('P', (Structure,), {'_fields_': []})\n"
        "def llama_model_quantize(source, out, parameters):\n"
        "    open(out, 'wb').write(bytes(10))\n"
        "    return 0\n"
        "def __getattr__(name):\n"
        "    import os, sys\n"
        "    sys.stderr.write(f'asked of {os.path.getsize(sys.argv[1])} bytes\\n')\n"
        "    sys.exit(2)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    types = ("--peer-python", sys.executable, "--peer-type", "Q4_K_M")
    assert main([str(MODEL), *SMALL, *types]) == 2
    errors = capfd.readouterr().err.splitlines()
    assert errors[0] == "asked of 10 bytes"
    assert errors[-1].startswith("error: llama.cpp Q4_K_M ended without an answer")


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="this Python has the peer")
def test_a_type_without_a_peer(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([str(MODEL), *SMALL, "--peer-type", "Q4_K_M"]) == 2
    assert "--peer-type: no Python with llama_cpp makes it" in capfd.readouterr().err


def test_the_worker_of_before_is_still_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of jinfer, measuring beside this one, starts it so."""
    seen = list[Namespace]()

    def work(options: Namespace) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(bench_cpu, "_work", work)
    monkeypatch.setattr("jinfer.progress._shown", None)  # a worker shows none, for good
    assert main(["--worker", "jinfer", "m.gguf", "--set", "a=1"]) == 0
    (options,) = seen
    assert (options.worker, options.models, options.set) == ("jinfer", ["m.gguf"], ["a=1"])

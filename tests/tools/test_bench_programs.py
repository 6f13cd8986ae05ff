"""The benchmark of whole programs, as far as it goes without a GPU."""

from __future__ import annotations

import jax
import pytest

from jinfer.ops.backend import target_platform
from tools import bench_programs
from tools.bench_programs import LLAMA_3_8B, bytes_read, kernels_of, lines, llama, operations

TINY = {
    **LLAMA_3_8B,
    "vocab_size": 512,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 512,
}


def test_says_what_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_gpu():
        pytest.skip("there is one")
    monkeypatch.setenv("XLA_FLAGS", "")
    assert bench_programs.main(["--kernels"]) == 2
    assert capsys.readouterr().err == "error: this needs a GPU; JAX found cpu\n"
    with pytest.raises(SystemExit):
        bench_programs.main(["--tasks", "decode"])
    assert "'decode' is none; give decode-N, sampled-N or prompt-N" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_programs.main(["--tasks", "decode-17"])
    assert "'decode-17' is too many; give at most decode-16" in capsys.readouterr().err


def test_a_place_that_is_none_is_told_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert bench_programs.main(["--json", "/no/such/figures.json"]) == 2
    assert capsys.readouterr().err.startswith("error: /no/such/figures.json: there is no folder")


def test_what_programs_must_read_and_compute() -> None:
    with target_platform("gpu"):
        model = llama("q4")
    # 4 bits, and a scale and a base of 16 for each 32 weights; norms; 1,024 keys and values.
    layer = (2 * 4096 + 2 * 1024 + 3 * 14336) * 4096
    weights = 32 * layer + 128256 * 4096
    kept = 32 * 2 * 8 * 128 * 2 * 1024
    assert bytes_read(model, "decode-1") == weights * 5 // 8 + 65 * 4096 * 4 + kept
    assert bytes_read(model, "prompt-512") == weights * 5 // 8 + 65 * 4096 * 4
    assert operations(model, "decode-16") == 16 * 2 * weights
    assert operations(model, "prompt-512") == 512 * 2 * 32 * layer + 2 * 128256 * 4096


def test_programs_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_programs.SHAPES, "llama3_8b", ("llama", TINY))
    monkeypatch.setattr(bench_programs, "SLOT_BLOCKS", 32)
    for rate in ("copy_rate", "matmul_rate"):
        monkeypatch.setattr(bench_programs, rate, lambda: 1e9)
    tasks = ["decode-2", "sampled-2", "prompt-64"]
    found = bench_programs.measure(["q4"], tasks, kernels=False)
    assert [row["task"] for row in found["programs"]] == tasks
    assert all(row["seconds"] > 0 and row["of_copy"] > 0 for row in found["programs"])
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_kernels_are_listed() -> None:
    times = {"short": (1e-6, 2.0), "long": (8e-6, 4.0)}
    assert [" ".join(line.split()) for line in lines(times)] == [
        "8.0 us 4.0 x 2.00 us long",
        "1.0 us 2.0 x 0.50 us short",
        "9.0 us 6.0 kernels in all",
    ]
    assert list(lines({})) == []
    assert kernels_of(lambda: jax.block_until_ready(jax.numpy.arange(3))) == {} or on_gpu()


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"

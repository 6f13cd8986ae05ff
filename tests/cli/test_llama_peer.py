"""The protocol of what measures llama.cpp, with a stand-in for its functions."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jinfer.cli.bench.bench_cpu import EngineProcess, EngineUnderTest
from jinfer.cli.bench.llama_peer import PROMPT, STEPS, ask, command

# Counts what it computes; a token takes a thousandth of a second.
STAND_IN = """
import ctypes, types
llama_log_set = lambda *_: None
llama_backend_init = llama_memory_clear = llama_get_memory = lambda *_: None
llama_model_default_params = types.SimpleNamespace
llama_context_default_params = types.SimpleNamespace
llama_model_load_from_file = lambda name, _: name != b"broken"
llama_model_get_vocab = lambda _: None
llama_vocab_n_tokens = lambda _: 8
def llama_init_from_model(model, settings):
    print("threads", settings.n_threads, settings.n_threads_batch)
    return True
class llama_batch_init:
    def __init__(self, tokens, _, sequences):
        self.token, self.pos, self.n_seq_id, self.logits = ([0] * tokens for _ in range(4))
        self.seq_id = [[0] for _ in range(tokens)]
def llama_decode(context, batch):
    import time
    time.sleep(batch.n_tokens / 1000)
    return 0
numbers = (ctypes.c_float * 8)()
chain = []
llama_sampler_chain_default_params = llama_sampler_init_dist = lambda *_: None
llama_sampler_chain_init = lambda _: chain
llama_sampler_chain_add = lambda chain, stage: chain.append(stage)
llama_sampler_init_top_k = llama_sampler_init_temp = lambda number: number
llama_sampler_init_top_p = llama_sampler_init_min_p = lambda share, _: share
def llama_sampler_sample(chain, context, row):
    assert chain == [40, 0.95, 0.05, 0.8, None]
    return 3
llama_get_logits_ith = lambda *_: ctypes.cast(numbers, ctypes.POINTER(ctypes.c_float))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "llama_cpp.py").write_text(STAND_IN)
    return tmp_path


def test_it_measures_with_the_threads_it_is_told(folder: Path) -> None:
    done = subprocess.run(
        command(sys.executable, "model", "3"),
        input="decode 2\nsample 2\nprefill 64\n",
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    threads, started, decode, sample, prefill, memory = done.stdout.splitlines()
    assert threads == "threads 3 3"
    assert "decode" in json.loads(started)["kinds"]
    assert json.loads(memory)["rss"] > 0
    # Two sequences of STEPS tokens, or a prompt; PROMPT tokens before decoding do not count.
    assert PROMPT > 0 < STEPS
    assert 200 < json.loads(decode)["rate"] <= 1000
    assert 200 < json.loads(sample)["rate"] <= 1000
    assert 200 < json.loads(prefill)["rate"] <= 1000


def test_a_model_that_is_none(folder: Path) -> None:
    done = subprocess.run(
        command(sys.executable, "broken", "3"),
        input="",
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "error: broken: llama.cpp cannot load it\n"


@pytest.mark.parametrize("status", [-signal.SIGILL, 128 + signal.SIGILL])
def test_death_by_an_illegal_instruction(status: int, folder: Path) -> None:
    """As of a build whose tile configuration was never written."""
    dies = f"os.kill(os.getpid(), {-status})" if status < 0 else f"os._exit({status})"
    (folder / "llama_cpp.py").write_text(f"import os\n{dies}\n")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    script.chmod(0o700)
    with pytest.raises(OSError, match=r"^llama.cpp ended; an illegal.* barrier before _tile_load"):
        ask(str(script), {"tokenize": {}})
    side = EngineUnderTest("llama.cpp", tuple(command(str(script))), ("1",))
    with pytest.raises(OSError, match=rf"\(status {status}\); an illegal instruction: .*GCC 12"):
        EngineProcess(side, "model")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands the parent's peak down")
def test_peak_memory_is_that_of_the_process_alone() -> None:
    root = Path(__file__).parents[2]
    module = "jinfer.cli.bench.llama_peer"
    child = f"import sys; sys.path.append({str(root)!r}); from {module} import peak_memory"
    held = (
        "import subprocess, sys; held = bytearray(b'1') * (400 << 20); "
        f"subprocess.run([sys.executable, '-c', {child + '; print(peak_memory())'!r}], check=True)"
    )
    out = subprocess.run([sys.executable, "-c", held], check=True, capture_output=True, text=True)
    assert 1 < float(out.stdout) < 400


def test_quantizing_with_an_importance_matrix(folder: Path, tmp_path: Path) -> None:
    """The array of entries as `llama.h` has it: it ends with one whose name is null."""
    with (folder / "llama_cpp.py").open("a") as stand_in:
        stand_in.write("""
LLAMA_FTYPE_MOSTLY_IQ4_XS = 30
class llama_model_imatrix_data(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)),
                ("size", ctypes.c_size_t)]
class parameters(ctypes.Structure):
    _fields_ = [("ftype", ctypes.c_int), ("imatrix", ctypes.POINTER(llama_model_imatrix_data))]
llama_model_quantize_default_params = parameters
def llama_model_quantize(source, out, given):
    given, number = ctypes.cast(given, ctypes.POINTER(parameters)).contents, 0
    print(given.ftype, bool(given.imatrix))
    while given.imatrix and given.imatrix[number].name:
        entry = given.imatrix[number]
        print(entry.name.decode(), entry.data[: entry.size])
        number += 1
    return 0
""")
    file = str(tmp_path / "imatrix.npz")
    squares: dict[str, Any] = {"blk.0.attn_q.weight": [1.0, 2.0], "b": [3.0]}
    np.savez(file, **squares)

    def written(*arguments: str | None) -> str:
        request = json.dumps({"quantize": ["in", "out", "IQ4_XS", *arguments]})
        done = subprocess.run(
            command(sys.executable),
            input=request,
            env={"PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert not done.returncode, done.stderr
        return done.stdout

    assert written(file) == "30 True\nblk.0.attn_q.weight [1.0, 2.0]\nb [3.0]\n"
    assert written(None) == written() == "30 False\n"

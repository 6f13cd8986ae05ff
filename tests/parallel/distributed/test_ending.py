"""How jobs end: as they should, because a process was lost, or because they cannot begin."""

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import jax
import pytest

from jinfer.cpu.isa import own_isa
from jinfer.parallel.distributed.rendezvous import job_key
from jinfer.version import __version__
from tests.parallel.distributed.jobs import ended, flags, free_port, ran, started, started_job

GOLDEN = "tests/goldens/llama2"
PLAN = ["--set", "dtype=float32", "--set", "partition.devices=0;1"]
GENERATE = ["-m", "jinfer.generate", GOLDEN, "--ids", "5,6,7", "--greedy", "--max-tokens", "4"]


def post(port: int, **body: object) -> dict[str, object]:
    """What a server answers."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.load(answer))


def suppressed(port: int, body: dict[str, object]) -> None:
    """Asks a server that ends meanwhile."""
    with suppress(OSError, HTTPException):
        post(port, **body)


def answering(port: int, processes: Sequence[subprocess.Popen[str]]) -> None:
    """Waits until a server has answered."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and all(each.poll() is None for each in processes):
        try:
            assert post(port, prompt=[5, 6, 7], max_tokens=4, ignore_eos=True)["choices"]
            return
        except OSError:
            time.sleep(0.3)
    raise AssertionError([each.communicate() for each in processes if each.poll() is not None])


def serving(processes: int, *more: str) -> tuple[list[subprocess.Popen[str]], int]:
    """A job that has answered."""
    port = free_port()
    arguments = ["-m", "jinfer.serve", GOLDEN, *more, "--port", str(port), "--warm-up", "off"]
    job = started_job(arguments, processes)
    try:
        answering(port, job)
    except BaseException:
        for process in job:
            process.kill()
        raise
    return job, port


def test_the_end_of_process_0_ends_all() -> None:
    job, _ = serving(2, *PLAN)
    # As launchers do: the others wait for process 0 to say that it is over.
    for process in reversed(job):
        process.send_signal(signal.SIGTERM)
    found = ran(job, 60)
    assert [each.status for each in found] == [0, 0], found
    assert "error" not in found[1].err


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_lost_process_ends_all(lost: int) -> None:
    job, _ = serving(2, *PLAN)
    begun = time.monotonic()
    job[lost].kill()
    other = ended(job[1 - lost], 30)
    assert time.monotonic() - begun < 30
    # JAX aborts processes that have lost process 0, where its coordination service runs.
    assert other.status in ((3,) if lost else (3, -signal.SIGABRT))
    line = f"error: process {lost} of 2 at 127.0.0.1 was lost; the job ends"
    assert line in other.err or (lost == 0 and "coordination service" in other.err)
    ran(job)


def test_a_process_is_lost_while_jax_waits_for_it() -> None:
    """Nobody waits for JAX's own patience of minutes."""
    port = free_port()
    leading = started([*GENERATE, *PLAN, *flags(port, 2, 0)])
    deadline = time.monotonic() + 120
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port))
            break
        except OSError:
            assert time.monotonic() < deadline
            assert leading.poll() is None
            time.sleep(0.1)
    calling = Connection(os.dup(connection.fileno()))
    answer_challenge(calling, job_key())
    deliver_challenge(calling, job_key())
    hello = {"process": 1, "processes": 2, "jinfer": __version__, "jax": jax.__version__}
    calling.send_bytes(json.dumps(hello).encode())
    assert "service" in json.loads(calling.recv_bytes())
    calling.close()
    connection.close()
    found = ended(leading, 60)
    assert found.status == 3, found
    assert "error: process 1 of 2 at 127.0.0.1" in found.err
    assert "was lost; the job ends" in found.err


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["0;1;2;3", "0&1;2&3", "0&1&2&3"])
def test_one_of_four_is_lost_while_all_compute(plan: str) -> None:
    layers = ["--set", "partition.layers=[1, 1, 1, 0]"] if ";1;" in plan else []
    keys = ["--set", "dtype=float32", "--set", f"partition.devices={plan}", *layers]
    job, port = serving(4, *keys)
    body = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True}
    busy = threading.Thread(target=lambda: suppressed(port, body))
    busy.start()
    time.sleep(0.5)
    job[2].kill()
    found = ran(job, 30)
    busy.join()
    assert [each.status for each in found] == [3, 3, -signal.SIGKILL, 3]
    assert all("process 2 of 4" in each.err for n, each in enumerate(found) if n != 2)


def test_an_answer_is_all_that_is_printed() -> None:
    found = ran(started_job([*GENERATE, *PLAN, "--json"], 2))
    assert [each.status for each in found] == [0, 0], found
    assert len(json.loads(found[0].out)["token_ids"]) == 4
    assert found[1].out == ""


def differing(
    *messages: str,
    sources: Sequence[str] = (GOLDEN, GOLDEN),
    more: Sequence[Sequence[str]] = ((), ()),
    variables: Sequence[dict[str, Any]] = ({}, {}),
    keys: Sequence[str] = PLAN,
) -> None:
    """Two processes with other sources, flags or variables end with the same line."""
    port = free_port()
    job = [
        started(
            ["-m", "jinfer.generate", source, *GENERATE[3:], *keys, *flags(port, 2, rank), *own],
            **names,
        )
        for rank, (source, own, names) in enumerate(zip(sources, more, variables, strict=True))
    ]
    for each in ran(job):
        assert each.status == 2, each
        assert all(message in each.err for message in messages), each.err
        assert "Traceback" not in each.err
        assert each.err.count("\n") <= 3, each.err


def test_another_specification() -> None:
    message = "process 1 has another specification than process 0"
    differing(message, more=((), ("--set", "engine.slots=3")))


def test_a_process_without_the_checkpoint() -> None:
    """All processes report the error of the process that has it."""
    missing = "tests/goldens/missing"
    differing("process 1: ", missing, sources=(GOLDEN, missing))


@pytest.mark.skipif(own_isa() in (None, "portable", "neon"), reason="of processors with AVX2")
def test_another_processor() -> None:
    """Where one multiplies whole numbers and the other does not, arrays would differ."""
    isas = [{"JINFER_ISA": isa} for isa in ("avx2", "portable")]
    keys = ["--set", "partition.devices=0;1"]
    remedy = 'set quantization.activations = "float"'
    message = "process 1 has another processor than process 0"
    differing(message, remedy, variables=isas, keys=keys)


@pytest.mark.soak
def test_other_weights(tmp_path: Path) -> None:
    """Checkpoints of the same shapes are told apart by their bytes."""
    copy = tmp_path / "llama2"
    shutil.copytree(GOLDEN, copy)
    weights = next(copy.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-4096:] = bytes(byte ^ 1 for byte in content[-4096:])
    weights.write_bytes(content)
    differing("process 1 has another checkpoint than process 0", sources=(GOLDEN, str(copy)))


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        ([], "partition.devices: says nothing, but there are 2 processes"),
        (["partition.devices=0"], "leaves process 1 of 2 without a device"),
        (["partition.devices=0;1", "partition.cpu_layers=1"], "a stage on the host cannot be had"),
        (["partition.devices=0;1", 'speculation.draft="ngram"'], "speculation.draft: cannot"),
    ],
)
@pytest.mark.soak
def test_what_several_processes_cannot_do(keys: list[str], wrong: str) -> None:
    named = [word for key in keys for word in ("--set", key)]
    for each in ran(started_job([*GENERATE, "--set", "dtype=float32", *named], 2)):
        assert each.status == 2
        assert wrong in each.err

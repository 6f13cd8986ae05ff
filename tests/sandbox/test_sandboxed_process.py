"""A sandboxed process answers, or is ended at its limits; the next question is answered."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from jinfer.sandbox.sandboxed_process import SandboxedProcess, SandboxError


@pytest.fixture(scope="module")
def child() -> Iterator[SandboxedProcess]:
    child = SandboxedProcess("tests.sandbox.answers", memory=256 << 20, answer_bytes=1000)
    yield child
    child.close()


def test_answers_are_json(child: SandboxedProcess) -> None:
    for value in (None, 7, "é \ud800", [1, {"a": [True, 2.5]}]):
        assert child.ask(value, 5) == value


def test_output_is_no_answer_and_jax_is_not_imported(child: SandboxedProcess) -> None:
    assert child.ask("print", 5) == []


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("loop", "takes too long"),
        ("memory", "needs too much memory"),
        ("crash", "needs too much memory or makes a library fail"),
        ("long", "gives more than 1000 bytes"),
        ("deep", "nested too deeply"),
    ],
)
def test_process_ends_beyond_its_limits(child: SandboxedProcess, question: str, words: str) -> None:
    begun = time.monotonic()
    with pytest.raises(SandboxError, match=words):
        child.ask(question, 0.1)
    assert time.monotonic() - begun < 30
    assert child.ask("and then", 5) == "and then"


def test_process_cannot_write_files(child: SandboxedProcess) -> None:
    with pytest.raises(SandboxError):
        child.ask("write", 5)


def test_threads_get_their_own_answers(child: SandboxedProcess) -> None:
    found: dict[int, int] = {}

    def ask(number: int) -> None:
        for _ in range(20):
            found[number] = child.ask(number, 5)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: number for number in range(8)}


def test_process_ends_with_its_parent() -> None:
    program = (
        "from jinfer.sandbox.sandboxed_process import SandboxedProcess\n"
        "child = SandboxedProcess('tests.sandbox.answers', memory=256 << 20, answer_bytes=1000)\n"
        "child.ask(1, 5)\n"
        "print(child._process.pid)\n"
        "import os\n"
        "os._exit(0)\n"  # nothing is tidied up
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    deadline = time.monotonic() + 30
    while is_running(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(process: int) -> bool:
    """Whether a process is there and has not ended; one that nobody waits for stays as a Z."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

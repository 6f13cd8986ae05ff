"""Programs that end while a model answers: their answer comes, or nothing but one line."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LLAMA2 = ROOT / "tests" / "goldens" / "llama2"

BEGIN = """
import asyncio, sys, threading, time
from jinfer import LLM, AsyncLLM
long = {"max_tokens": 120, "ignore_eos": True}
llm = LLM(sys.argv[1])
"""
STREAM = "stream = llm.stream([1, 5, 9], **long); next(stream)\n"
THREAD = """
def work():
    print(len(llm.generate([1, 5, 9], **long)[0].token_ids))
threading.Thread(target=work).start()
"""
DAEMON = """
def work():
    while True:
        USE
threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""
ASYNC = """
llm = AsyncLLM(llm)
async def main():
    global stream
    stream = llm.stream([1, 5, 9], **long)
    await anext(stream)
asyncio.run(main())
"""
ASYNC_THREAD = """
async def main():
    print(len((await AsyncLLM(llm).generate([1, 5, 9], **long))[0].token_ids))
threading.Thread(target=lambda: asyncio.run(main())).start()
"""
EXIT = """
def work():
    stream = llm.stream([1, 5, 9], **long)
    next(stream)
    sys.exit(3)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
LATE = """
def work():
    threading.main_thread().join()
    print(llm.logits([[1, 5, 9]])[0].shape[0])
threading.Thread(target=work).start()
"""
SOAK = pytest.mark.soak


def ended(program: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a program."""
    command = [sys.executable, "-c", BEGIN + program, str(LLAMA2)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    return done.returncode, done.stdout.strip(), done.stderr


@pytest.mark.parametrize(
    ("program", "status", "printed"),
    [
        pytest.param(STREAM, 0, "", id="an unfinished stream"),
        pytest.param(STREAM + "sys.exit(5)", 5, "", id="exit with a stream", marks=SOAK),
        pytest.param("llm.me = llm\n" + STREAM, 0, "", id="a model in a cycle", marks=SOAK),
        pytest.param(THREAD, 0, "120", id="a thread that generates"),
        pytest.param(LATE, 0, "3", id="a thread that begins late", marks=SOAK),
        pytest.param(DAEMON.replace("USE", "llm.generate([1, 5], **long)"), 0, "", id="a daemon"),
        pytest.param(
            DAEMON.replace("USE", "list(llm.stream([1, 5], **long))"),
            *(0, ""),
            id="a daemon that streams",
            marks=SOAK,
        ),
        pytest.param(
            DAEMON.replace("USE", "llm.logits([[1, 5, 9]])"),
            *(0, ""),
            id="a daemon with a job",
            marks=SOAK,
        ),
        pytest.param(ASYNC, 0, "", id="an AsyncLLM that was not closed", marks=SOAK),
        pytest.param(ASYNC_THREAD, 0, "120", id="an event loop in a thread", marks=SOAK),
        pytest.param(EXIT, 0, "", id="exit in a thread", marks=SOAK),
    ],
)
def test_a_program_that_ends_while_a_model_answers(program: str, status: int, printed: str) -> None:
    assert ended(program) == (status, printed, "")


@pytest.mark.soak
def test_an_error_beside_an_unfinished_stream_is_the_only_one() -> None:
    status, printed, errors = ended(STREAM + 'raise ValueError("mine")')
    assert (status, printed) == (1, "")
    assert errors.startswith("Traceback")
    assert errors.count("Error") == errors.count("ValueError") == 1 + errors.count("raise Value")


@pytest.mark.soak
def test_a_model_that_is_opened_too_late_says_so() -> None:
    program = "def work():\n    threading.main_thread().join()\n    LLM(sys.argv[1])\n"
    status, _, errors = ended(program + "threading.Thread(target=work).start()")
    assert status == 0
    assert "EngineError: the main thread has returned" in errors.splitlines()[-1]

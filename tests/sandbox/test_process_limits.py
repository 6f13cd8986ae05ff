"""Limits of the system: one line instead of an abort, a traceback or a wait without an end."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from jinfer.api.user_errors import USER_ERRORS
from jinfer.cli.terminal import exit_status
from jinfer.engine.runner import compiled_programs
from jinfer.progress import task
from jinfer.sandbox import process_limits
from tests.server.running import GOLDENS, ROOT

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's")


def failing(after: int) -> Callable[[threading.Thread], None]:
    """A `Thread.start` that fails from some thread on."""
    start, left = threading.Thread.start, [after]

    def started(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    return started


def test_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = {"RLIMIT_AS": 1_300_000_000}
    monkeypatch.setattr(process_limits, "_soft_limit", allowed.get)
    with pytest.raises(USER_ERRORS, match=r"1.3 GB of address space \(ulimit -v\), and a model"):
        process_limits.check_process_limits()
    allowed["RLIMIT_AS"] = 1 << 60
    process_limits.check_process_limits()


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_limits, "_soft_limit", {"RLIMIT_NPROC": 200}.get)
    before = {*threading.enumerate()}
    process_limits.check_process_limits()
    monkeypatch.setattr(threading.Thread, "start", failing(3))
    with pytest.raises(
        process_limits.ProcessLimitError, match=r"cannot start \d+ threads.*raise ulimit -u"
    ):
        process_limits.check_process_limits()
    assert {*threading.enumerate()} <= before, "its own threads end; those of other tests may too"


@pytest.mark.parametrize(
    ("error", "output"),
    [
        (RuntimeError("can't start new thread"), "no thread can be started; at most 20 are"),
        (BlockingIOError(errno.EAGAIN, ""), "no process can be started; at most 20 are allowed"),
        (MemoryError(), "out of memory; ulimit -v allows 0.5 GB"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory ([Errno 12] Cannot all"),
        (ImportError("x.so: failed to map segment from shared object"), "out of address space (x"),
        (RuntimeError("another"), None),
        (ImportError("No module named 'x'"), None),
    ],
    ids=str,
)
def test_errors_that_limits_explain(
    error: Exception,
    output: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    allowed = {"RLIMIT_AS": 500_000_000, "RLIMIT_NPROC": 20}
    monkeypatch.setattr(process_limits, "_soft_limit", allowed.get)
    monkeypatch.setattr(process_limits, "_PIDS", ())
    monkeypatch.setattr(exit_status, "_stuck", False)

    def command() -> int:
        raise error

    if output is None:
        with pytest.raises(type(error)):
            exit_status.run_for_status(command)
        return
    assert exit_status.run_for_status(command) == 2
    reported = capsys.readouterr().err
    assert reported.startswith(f"error: {output}")
    assert reported.count("\n") == 1
    assert exit_status._stuck


def test_thread_that_cannot_start_ends_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {*threading.enumerate()}
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", failing(1))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            compiled_programs._compiler_threads(3)
        with task("something", shown=True):
            pass
    for thread in {*threading.enumerate()} - before:
        thread.join(10)
        assert not thread.is_alive()


@LINUX
def test_command_with_little_address_space_ends_with_one_line() -> None:
    command = [sys.executable, "-m", "jinfer", "generate", str(GOLDENS / "llama2")]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -v 1300000; exec "$@"', "sh", *command, "--ids", "5 6"],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: this process may have 1.3 GB of address space")
    assert done.stderr.count("\n") == 1

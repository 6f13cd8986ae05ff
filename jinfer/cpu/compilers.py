"""Compilers that run beside one another, and what they complain of."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor


class BuildError(Exception):
    """The custom calls cannot be compiled: one line that says why and what to do."""


def run_all(commands: Sequence[list[str]], cores: int) -> None:
    """Runs commands, as many at a time as there are cores.

    Where one fails, or the caller is interrupted, nobody waits for the others. They stay in this
    process's group, so that a terminal's Ctrl-C ends also those that a helping thread waits for.

    Raises:
        BuildError: one fails.
    """
    running = set[subprocess.Popen[bytes]]()

    def run(command: list[str]) -> None:
        # Not a pipe, whose end would come with that of the processes which a compiler starts.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=complaints)
            running.add(process)
            status = process.wait()
            running.discard(process)
            complaints.seek(0)
            lines = complaints.read().strip().splitlines() or [f"exit status {status}"]
        if status:
            raise BuildError(f"{command[0]} fails: {reason(lines)}")

    pool = ThreadPoolExecutor(cores)
    try:
        for _ in pool.map(run, commands):
            pass
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running):
            process.terminate()
        raise
    pool.shutdown()


def reason(lines: list[str]) -> str:
    """The line of a compiler's complaints that says why; a linker's own comes last."""
    for number, line in enumerate(lines):
        if "error" in line:
            return lines[number - 1] if line.startswith("collect2:") and number else line
    return lines[0]

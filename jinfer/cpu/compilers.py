"""Compilers that run beside one another, and what they complain of."""

from __future__ import annotations

import subprocess
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
    running = set[subprocess.Popen[str]]()

    def run(command: list[str]) -> None:
        null, pipe = subprocess.DEVNULL, subprocess.PIPE
        with subprocess.Popen(command, stdout=null, stderr=pipe, text=True) as process:
            running.add(process)
            _, complaints = process.communicate()
            running.discard(process)
        if process.returncode:
            lines = complaints.strip().splitlines() or [f"exit status {process.returncode}"]
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

"""Compilers that run beside one another, and what they complain of."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from jinfer.progress import Task


class BuildError(Exception):
    """The custom calls cannot be compiled: one line that says why and what to do."""


def _nothing(command: list[str]) -> None:
    pass


def run_all(
    commands: Sequence[list[str]], cores: int, done: Callable[[list[str]], None] = _nothing
) -> None:
    """Runs commands, as many at a time as there are cores.

    Where one fails, or the caller is interrupted, nobody waits for the others. They stay in this
    process's group, so that a terminal's Ctrl-C ends also those that a helping thread waits for.

    Args:
        done: is given each command that has succeeded, by the thread that waited for it.

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
        done(command)

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


def compile_and_link(
    commands: Sequence[list[str]],
    link: list[str],
    objects: Path,
    cores: int,
    step: Task | None = None,
) -> None:
    """Compiles what has not been compiled, and links all of it.

    Args:
        commands: of which the last word is the file that each makes.
        objects: a folder that finished files are linked into; those that an interrupted build has
            left there are not made again.
        step: a task of which each command is a step.

    Raises:
        BuildError: a command fails.
    """

    def kept(command: list[str]) -> bool:
        with suppress(OSError):
            os.link(objects / Path(command[-1]).name, command[-1])
            return True
        return False

    def done(command: list[str]) -> None:
        with suppress(OSError):  # a file system without links: nothing is kept
            os.link(command[-1], objects / Path(command[-1]).name)
        if step is not None:
            step.update()

    left = [command for command in commands if not kept(command)]
    if step is not None:
        step.total = len(commands)
        step.update(len(commands) - len(left))
    run_all(left, cores, done)
    try:
        run_all([link], 1)
    except BuildError:
        # One that was cut short, by a full disk or a machine that stopped, is not kept for ever.
        for command in commands:
            (objects / Path(command[-1]).name).unlink(missing_ok=True)
            Path(command[-1]).unlink(missing_ok=True)
        if len(left) == len(commands):
            raise
        compile_and_link(commands, link, objects, cores, step)


def reason(lines: list[str]) -> str:
    """The line of a compiler's complaints that says why; a linker's own comes last."""
    for number, line in enumerate(lines):
        if "error" in line:
            return lines[number - 1] if line.startswith("collect2:") and number else line
    return lines[0]

"""Runs C++ compilers in parallel, and extracts the reason of a failure."""

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
    """The custom calls cannot be compiled: one line with the reason and the remedy."""


def run_all(
    commands: Sequence[list[str]],
    cores: int,
    done: Callable[[list[str]], None] = lambda command: None,
) -> None:
    """Runs commands, `cores` at a time.

    If one fails, or the caller is interrupted, the others are terminated. They stay in this
    process's group, so that a terminal's Ctrl-C ends those of helper threads too.

    Args:
        done: called with each command that succeeds, on the thread that waited for it.

    Raises:
        BuildError: a command fails.
    """
    running = set[subprocess.Popen[bytes]]()

    def run(command: list[str]) -> None:
        # Not a pipe, which would stay open until all processes that a compiler starts have ended.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
            running.add(process)
            status = process.wait()
            running.discard(process)
            errors.seek(0)
            lines = errors.read().strip().splitlines() or [f"exit status {status}"]
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
    """Compiles missing object files, and links everything.

    Args:
        commands: compiler commands whose last word is the output file.
        link: the linker's command.
        objects: a folder that finished files are hard-linked into; those of an interrupted build
            are reused.
        cores: commands that run at a time.
        step: a task that each command advances by a step.

    Raises:
        BuildError: a command fails.
    """

    def reuse(command: list[str]) -> bool:
        with suppress(OSError):
            os.link(objects / Path(command[-1]).name, command[-1])
            return True
        return False

    def done(command: list[str]) -> None:
        with suppress(OSError):  # a file system without hard links
            os.link(command[-1], objects / Path(command[-1]).name)
        if step is not None:
            step.update()

    remaining = [command for command in commands if not reuse(command)]
    if step is not None:
        step.total = len(commands)
        step.update(len(commands) - len(remaining))
    run_all(remaining, cores, done)
    try:
        run_all([link], 1)
    except BuildError:
        # Drops reused objects, which a full disk or a crash may have truncated, and tries again.
        for command in commands:
            (objects / Path(command[-1]).name).unlink(missing_ok=True)
            Path(command[-1]).unlink(missing_ok=True)
        if len(remaining) == len(commands):
            raise
        compile_and_link(commands, link, objects, cores, step)


def reason(lines: list[str]) -> str:
    """Finds the line of a compiler's or linker's errors that names the reason."""
    for number, line in enumerate(lines):
        if "error" in line:
            return lines[number - 1] if line.startswith("collect2:") and number else line
    return lines[0]

"""A program on a terminal, and how long it says nothing."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cli.terminal import ROOT

_WORK = 0.005  # seconds of a processor


@dataclass
class Heard:
    """What a program has said on a terminal.

    Attributes:
        silence: the longest time until it said something, in seconds of a machine that has nothing
            else to do: less than on the clock, where others compute as well.
        text: all that it said.
        before: the end of what it had said before that time.
        chunks: what it said at a time, and when, in such seconds since it was run.
    """

    status: int
    silence: float
    text: str
    before: str
    chunks: Sequence[tuple[float, str]]

    @property
    def most(self) -> float:
        """How long it may be silent, in seconds: 1, or half of its start on slow machines.

        Where a start takes longer than 1 second, one without a word is too long.
        """
        begun = (at for at, said in self.chunks if "opening" in said or "compiling" in said)
        return max(1.0, next(begun, 0.0) / 2)


class Load:
    """How much longer this process's work takes than it would alone, asked ten times a second."""

    def __init__(self) -> None:
        self._found: list[tuple[float, float]] = []
        self._ended = False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._ended:
            begun, used = time.monotonic(), time.thread_time()
            while time.thread_time() - used < _WORK:
                pass
            self._found.append((begun, (time.monotonic() - begun) / _WORK))
            time.sleep(0.1)

    def end(self) -> None:
        """Asks no more."""
        self._ended = True

    def within(self, begin: float, end: float) -> float:
        """From 1 on, in the mean of a time."""
        found = [load for when, load in self._found if begin - 0.2 <= when <= end]
        return max(1.0, sum(found) / len(found)) if found else 1.0


def listen(command: list[str], typed: str = "", folder: Path = ROOT, **environment: str) -> Heard:
    """Runs `python -m` with a command on a terminal of 80 columns, where some keys were pressed."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    load = Load()
    everything = {**os.environ, "TERM": "xterm", "JINFER_NO_HISTORY": "1", **environment}
    everything["PAGER"] = "cat"
    everything["PYTHONPATH"] = str(ROOT)
    program = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, start_new_session=True,
        env=everything,
    )  # fmt: skip
    os.close(theirs)
    os.write(mine, typed.encode())
    last, silence, text, before = time.monotonic(), 0.0, "", ""
    since, chunks = 0.0, list[tuple[float, str]]()
    while True:
        ready = select.select([mine], [], [], 300)[0]
        assert ready, text
        try:
            said = os.read(mine, 4096)
        except OSError:  # it has ended
            said = b""
        if not said:
            break
        now = time.monotonic()
        if (quiet := (now - last) / load.within(last, now)) > silence:
            silence, before = quiet, text[-80:]
        last, since = now, since + quiet
        chunks.append((since, said.decode(errors="replace")))
        text += chunks[-1][1]
    os.close(mine)
    load.end()
    return Heard(program.wait(60), silence, text, before, chunks)

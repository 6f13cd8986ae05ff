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
from dataclasses import dataclass
from pathlib import Path

from tests.terminal.terminal import ROOT


@dataclass
class Heard:
    """What a program has said on a terminal.

    Attributes:
        silence: the longest time until it said something, in seconds, less what the machine did
            not give to a thread of this process that asked for a moment meanwhile.
        text: all that it said.
        before: the end of what it had said before that time.
    """

    status: int
    silence: float
    text: str
    before: str


class Delays:
    """How late a thread is that wants to run ten times a second, on a machine with others."""

    def __init__(self) -> None:
        self.late: list[tuple[float, float]] = []
        self._ended = False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._ended:
            begun = time.monotonic()
            time.sleep(0.1)
            self.late.append((begun, time.monotonic() - begun - 0.1))

    def end(self) -> None:
        """Lets its thread end."""
        self._ended = True

    def within(self, begin: float, end: float) -> float:
        """All delays of a time, together."""
        return sum(late for when, late in self.late if begin - 0.1 <= when <= end)


def listen(command: list[str], typed: str = "", folder: Path = ROOT, **environment: str) -> Heard:
    """Runs `python -m` with a command on a terminal of 80 columns, where some keys were pressed."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    delays = Delays()
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
        if (quiet := now - last - delays.within(last, now)) > silence:
            silence, before = quiet, text[-80:]
        last, text = now, text + said.decode(errors="replace")
    os.close(mine)
    delays.end()
    return Heard(program.wait(60), silence, text, before)

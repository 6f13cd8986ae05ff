"""A program that believes it runs in a terminal."""

import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Terminal:
    """A program that believes it runs in a terminal."""

    def __init__(self, *command: str, env: Mapping[str, str] | None = None) -> None:
        self.file, theirs = pty.openpty()
        self.program = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            start_new_session=True,
            env=env or {**os.environ, "JINFER_NO_HISTORY": "1"},
        )
        os.close(theirs)
        self.seen = ""

    def wait_for(self, pattern: str, seconds: float = 120) -> re.Match[str]:
        """Reads until what the program has printed since the last call matches."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.seen)) is None:
            ready = select.select([self.file], [], [], max(0, end - time.monotonic()))[0]
            assert ready, f"{pattern!r} did not come; the program printed {self.seen!r}"
            try:
                self.seen += os.read(self.file, 4096).decode(errors="replace")
            except OSError as error:  # the program has ended
                raise AssertionError(f"ended without {pattern!r}: {self.seen!r}") from error
        self.seen = self.seen[found.end() :]
        return found

    def type(self, line: str) -> None:
        """Types what ends with the key that sends it."""
        os.write(self.file, line.encode())

    def status(self) -> int:
        """The exit status of the program, which ends."""
        status = self.program.wait(timeout=60)
        os.close(self.file)
        return status

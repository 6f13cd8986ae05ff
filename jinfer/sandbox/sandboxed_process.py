"""Sandboxed process: a child process with memory and time limits that answers questions.

It bounds what no check in this process can: a library in C or Rust, a regular expression, one step
of an interpreter. The process runs a function of jinfer on JSON and returns JSON, so its output can
be wrong but not dangerous. Beyond its limits it is killed, and the next question starts another.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

WALL_SECONDS = 60.0  # a limit on waiting that uses no CPU time; generous, for busy machines
_INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ")
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
# Parent packages are imported as bare folders, because their own code imports much that is not
# needed.
_START = """
import json, sys, types
path, folder, module = json.loads(sys.argv[1])
sys.path[:] = path
parts = module.split(".")
for end in range(1, len(parts) if parts[0] == "jinfer" else 2):
    names = ["jinfer", *parts[1:end]]
    package = types.ModuleType(".".join(names))
    package.__path__ = ["/".join([folder, *names[1:]])]
    sys.modules[package.__name__] = package
from jinfer.sandbox.child_main import serve
serve(module, *map(int, sys.argv[2:]))
"""


class SandboxError(Exception):
    """The child process ended, or was killed, before it answered; the message is the reason."""


class SandboxedProcess:
    """Calls a function of a module in a process of its own.

    The first question starts the process. Threads take turns to use it.
    """

    def __init__(self, module: str, *, memory: int, answer_bytes: int) -> None:
        """
        Args:
            module: has a function `answer` from a JSON value to another one.
            memory: bytes of address space.
            answer_bytes: maximum size of an answer.
        """
        self._module, self._memory, self._max_bytes = module, memory, answer_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def ask(self, question: Any, seconds: float) -> Any:
        """Answer a question.

        Args:
            seconds: limit of processor time.

        Raises:
            SandboxError: there was no answer within the limits.
        """
        message = json.dumps([seconds, question]).encode()
        with self._lock:
            try:
                return self._answer(message)
            except BaseException:
                # A late answer must not be taken for the next one's, and a child that ran out of
                # memory frees it only when it exits.
                self._stop()
                raise

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            self._stop()

    def _answer(self, message: bytes) -> Any:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + WALL_SECONDS
        try:
            process.stdin.write(len(message).to_bytes(8, "little"))
            process.stdin.write(message)
            process.stdin.flush()
        except OSError:
            raise self._died() from None
        size = int.from_bytes(self._read(8, deadline), "little")
        if size > self._max_bytes:
            raise SandboxError(f"gives more than {self._max_bytes} bytes")
        answer: Mapping[str, Any] = json.loads(self._read(size, deadline))
        if "error" in answer:
            raise SandboxError(str(answer["error"])[:300])
        return answer["value"]

    def _read(self, count: int, deadline: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor, data = self._process.stdout.fileno(), bytearray()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while len(data) < count:
            if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
                raise SandboxError(f"takes more than {WALL_SECONDS:g} s")
            piece = os.read(descriptor, min(count - len(data), 1 << 20))
            if not piece:
                raise self._died()
            data += piece
        return bytes(data)

    def _died(self) -> SandboxError:
        assert self._process is not None
        code = self._process.wait()
        if code == -signal.SIGPROF:
            return SandboxError("takes too long")
        return SandboxError("needs too much memory or makes a library fail")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        folder = str(Path(__file__).resolve().parents[1])
        start = json.dumps([[path or os.getcwd() for path in sys.path], folder, self._module])
        kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        self._process = process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, start, str(self._memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=kept | _QUIET,
        )
        self._end = weakref.finalize(self, _finish, process)
        return process

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


def _finish(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):  # a question that was never read
            pipe.close()
    process.wait()

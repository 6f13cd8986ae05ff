"""Sandbox child process: sets its own limits, then answers questions from standard input."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any


def serve(module: str, memory: int) -> None:
    """Answer the questions of a `SandboxedProcess` until its input ends.

    Args:
        module: the module whose `answer` is called.
        memory: bytes of address space that may be allocated from now on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, in a step of C code too
    # A library's output must not be mistaken for an answer.
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answer: Callable[[Any], Any] = importlib.import_module(module).answer
    for bound, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        _set_limit(bound, limit)
    while len(head := source.read(8)) == 8:
        seconds, question = json.loads(source.read(int.from_bytes(head, "little")))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # processor time of all threads
        try:
            result = {"value": answer(question)}
        except MemoryError:
            result = {"error": "needs too much memory"}
        except RecursionError:
            result = {"error": "is nested too deeply"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        del question
        data = json.dumps(result).encode()
        target.write(len(data).to_bytes(8, "little") + data)
        target.flush()


def _set_limit(kind: int, value: int) -> None:
    """Set a soft limit, unless an outer limit is lower."""
    _, hard = resource.getrlimit(kind)
    within = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (within, hard))

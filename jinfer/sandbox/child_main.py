"""Sandbox child process: sets its own limits, then answers questions from standard input."""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(module: str, memory: int) -> None:
    """Answers questions of a `SandboxedProcess`.

    Args:
        module: the module whose `answer` is called.
        memory: bytes of address space that may be allocated from now on.
    """
    # Output of a library must not be mistaken for an answer.
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
        # RLIMIT_CPU has whole seconds and kills the process, so one more.
        _set_limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds) + 1)
        try:
            said = {"value": answer(question)}
        except MemoryError:
            said = {"error": "needs too much memory"}
        except RecursionError:
            said = {"error": "is nested too deeply"}
        del question
        data = json.dumps(said).encode()
        target.write(len(data).to_bytes(8, "little") + data)
        target.flush()


def _set_limit(kind: int, value: int) -> None:
    """Sets a soft limit, and never raises a lower outer one."""
    _, hard = resource.getrlimit(kind)
    within = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (within, hard))

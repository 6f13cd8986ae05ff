"""The other end of `child.Child`: bounds itself, then answers until nobody asks any more."""

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
    """Answers questions from the standard input, for `Child` alone.

    Args:
        module: whose `answer` is asked.
        memory: bytes of address space from now on.
    """
    # What a library prints must not be taken for an answer.
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answer: Callable[[Any], Any] = importlib.import_module(module).answer
    for bound, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        _bound(bound, limit)
    while len(head := source.read(8)) == 8:
        seconds, question = json.loads(source.read(int.from_bytes(head, "little")))
        # Whole seconds are all that there is; the end of the process, so one more.
        _bound(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds) + 1)
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


def _bound(kind: int, value: int) -> None:
    """Sets the bound that counts; the outer one stays, as it cannot be raised again."""
    _, hard = resource.getrlimit(kind)
    within = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (within, hard))

"""Sandboxed compilation: grammars whose compilation might not end, in a child process first.

llguidance bounds the work of a step, but not that of intersecting patterns or of divisibility by
a great number: twenty patterns in an `allOf` take it hours. A thread cannot be stopped, a process
can.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinfer.sampling.request_errors import ConstraintError

TRIAL_SECONDS = 2  # of the processor
TRIAL_BYTES = 2 << 30

_WAIT_SECONDS = 30  # by the clock, which on a busy machine runs much faster
_CHILD = Path(__file__).with_name("sandboxed_compile_child.py")


class UnfinishedError(ConstraintError):
    """A compilation that was stopped; on a less busy machine it might have finished."""


def compile_sandboxed(grammars: list[str], limits: Mapping[str, Any]) -> list[str]:
    """Compiles grammars in a child process with limits on time and memory.

    Args:
        grammars: what llguidance reads.
        limits: arguments of its `LLParserLimits`.

    Returns:
        llguidance's messages; empty where it has none.

    Raises:
        UnfinishedError: the grammars need more than `TRIAL_SECONDS` or `TRIAL_BYTES`.
    """
    job = {
        "grammars": grammars,
        "limits": dict(limits),
        "seconds": TRIAL_SECONDS,
        "bytes": TRIAL_BYTES,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_CHILD)],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=_WAIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode != 0:
        raise UnfinishedError(
            f"takes more than {TRIAL_SECONDS} s or {TRIAL_BYTES >> 30} GiB to compile; use fewer or"
            " simpler patterns and smaller counts"
        )
    messages: list[str] = json.loads(done.stdout)
    return messages

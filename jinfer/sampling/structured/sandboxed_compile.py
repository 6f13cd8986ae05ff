"""Grammars whose compilation might not end are tried in another process first.

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
    """A compilation that was stopped, which on a less busy machine might have come to its end."""


def try_apart(grammars: list[str], limits: Mapping[str, Any]) -> list[str]:
    """Compiles in a process that is stopped in time; takes about 0.1 s for a grammar that is fine.

    Args:
        grammars: what llguidance reads.
        limits: arguments of its `LLParserLimits`.

    Returns:
        llguidance's messages; empty where it has none.

    Raises:
        UnfinishedError: the grammars need more time or memory than there is for them.
    """
    asked = {
        "grammars": grammars,
        "limits": dict(limits),
        "seconds": TRIAL_SECONDS,
        "bytes": TRIAL_BYTES,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_CHILD)],
            input=json.dumps(asked),
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

"""Sandboxed compilation: grammars whose compilation might not end, in a child process first.

llguidance bounds the work of a step, but not that of intersecting patterns or of divisibility by
a great number: twenty patterns in an `allOf` take it hours. A thread cannot be stopped, a process
can.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinfer.sampling.request_errors import ConstraintError
from jinfer.sandbox.sandboxed_process import SandboxedProcess, SandboxError

TRIAL_SECONDS = 2  # of the processor
TRIAL_BYTES = 2 << 30

_MAX_ANSWER = 64 << 20  # bytes of messages
_CHILD = "jinfer.sampling.structured.sandboxed_compile_child"


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
    child = SandboxedProcess(_CHILD, memory=TRIAL_BYTES, answer_bytes=_MAX_ANSWER)
    try:
        messages: list[str] = child.ask([grammars, dict(limits)], TRIAL_SECONDS)
    except SandboxError:
        raise UnfinishedError(
            f"takes more than {TRIAL_SECONDS} s or {TRIAL_BYTES >> 30} GiB to compile; use fewer or"
            " simpler patterns and smaller counts"
        ) from None
    finally:
        child.close()
    return messages

"""PEFT's `rank_pattern` and `alpha_pattern`: regular expressions of module names, in a sandbox.

A pattern applies to modules whose name, or its end after a dot, it matches; the first match applies
(peft's `get_pattern_key`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jinfer.sandbox.sandboxed_process import SandboxedProcess

_MEMORY = 1 << 30
_SECONDS = 2.0  # seconds of the processor, for all names
_NAME = re.compile(r"\w+(\.\w+)*", re.ASCII)


def first_matches(patterns: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """The index of the first pattern that matches each name.

    Raises:
        SandboxError: a pattern is no regular expression, or takes too long.
    """
    if all(map(_NAME.fullmatch, patterns)):  # usual patterns need no process
        return answer([patterns, names])
    child = SandboxedProcess(__name__, memory=_MEMORY, answer_bytes=64 + 16 * len(names))
    try:
        found: list[int | None] = child.ask([list(patterns), list(names)], _SECONDS)
    finally:
        child.close()
    return found


def answer(question: Sequence[Sequence[str]]) -> list[int | None]:
    """Match names with patterns, in the sandbox; see `first_matches`."""
    patterns, names = question
    every = [re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns]
    return [
        next((i for i, pattern in enumerate(every) if pattern.match(name)), None) for name in names
    ]

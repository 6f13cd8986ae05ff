"""PEFT's `rank_pattern` and `alpha_pattern`: regular expressions of module names, in a sandbox.

A pattern is for the modules whose name, or the end of it behind a dot, it matches; the first one
counts (peft's `get_pattern_key`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jinfer.guard.sandboxed_process import SandboxedProcess

_MEMORY = 1 << 30
_SECONDS = 2.0  # of the processor, for all names
_NAME = re.compile(r"\w+(\.\w+)*", re.ASCII)


def first_matches(patterns: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """The index of the first pattern that matches each name.

    Raises:
        SandboxError: a pattern is no regular expression, or takes too long.
    """
    if all(map(_NAME.fullmatch, patterns)):  # the usual ones need no process
        return answer([patterns, names])
    child = SandboxedProcess(__name__, memory=_MEMORY, answer_bytes=64 + 16 * len(names))
    try:
        found: list[int | None] = child.ask([list(patterns), list(names)], _SECONDS)
    finally:
        child.close()
    return found


def answer(question: Sequence[Sequence[str]]) -> list[int | None]:
    """As `first_matches`, of the patterns and the names; what a sandbox computes."""
    patterns, names = question
    every = [re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns]
    return [next((i for i, one in enumerate(every) if one.match(name)), None) for name in names]

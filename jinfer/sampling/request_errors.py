"""Request errors: wrong parameters, constraints that do not compile."""

from __future__ import annotations


class RequestError(ValueError):
    """A request that cannot be run as it is: says why, and what to change."""


class ConstraintError(ValueError):
    """One line: which of json_schema, regex, choice and grammar, where in it, and what is wrong."""


def short(text: str, max_length: int = 80) -> str:
    """A text as one line of at most `most` characters, for an error."""
    line = " ".join(text.split())
    return line if len(line) <= max_length else line[: max_length - 1] + "…"

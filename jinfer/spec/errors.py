"""Errors of the specification language."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SpecError(ValueError):
    """A specification that cannot be used: names the file, the key, and what is allowed there."""

    def __init__(self, path: object, key: str, reason: str) -> None:
        self.path, self.key, self.reason = path, key, reason
        super().__init__(": ".join(str(part) for part in (path, key, reason) if part))


def nearest(word: str, allowed: Iterable[str]) -> str:
    """What is allowed instead of `word`, the nearest right word first: a clause for an error."""
    options = sorted(set(allowed))
    if not options:
        return "nothing is allowed here"
    close = get_close_matches(word, options, n=1, cutoff=0.6)
    shown = options if len(options) <= 24 else [*options[:24], "..."]
    listing = "allowed: " + ", ".join(shown)
    return f"did you mean {close[0]!r}? {listing}" if close else listing

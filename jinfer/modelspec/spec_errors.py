"""Specification errors: the file, the key, and the nearest valid word."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from difflib import get_close_matches

from jinfer.sandbox.sanitize import sanitized

_SHORT = reprlib.Repr(maxlevel=2, maxlist=8, maxdict=8, maxstring=100, maxother=100)


class SpecError(ValueError):
    """An invalid specification: the message names the file, the key, and what is allowed there."""

    def __init__(self, path: object, key: str, reason: str) -> None:
        self.path, self.key, self.reason = path, key, reason
        super().__init__(sanitized(": ".join(str(part) for part in (path, key, reason) if part)))


def nearest_hint(word: object, allowed: Iterable[str]) -> str:
    """What is allowed in place of `word`, the nearest word first: a clause for an error."""
    options = sorted({str(option) for option in allowed})
    if not options:
        return "nothing is allowed here"
    # The comparison is quadratic, so only the beginning of a long text is compared.
    close = get_close_matches(str(word)[:60], options, n=1, cutoff=0.6)
    shown = options if len(options) <= 24 else [*options[:24], "..."]
    listing = "allowed: " + ", ".join(shown)
    return f"did you mean {close[0]!r}? {listing}" if close else listing


def show_value(value: object) -> str:
    """A value as written, shortened to one line of an error."""
    try:
        shown = _SHORT.repr(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return "a number of too many digits"
    return " ".join(shown.split()) if "\n" in shown else shown  # arrays have several lines

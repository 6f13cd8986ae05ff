"""Sanitizing untrusted text for messages: one line of bounded length."""

from __future__ import annotations

_MAX_LENGTH = 2000  # characters
_END = 300  # characters at the end, which often say what to do


def sanitized(text: str, limit: int = _MAX_LENGTH) -> str:
    """Make a text one line without control characters; cut a long text in the middle.

    A name in a file may contain line breaks or terminal escape sequences.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= limit else f"{text[: limit - _END - 5]} ... {text[-_END:]}"

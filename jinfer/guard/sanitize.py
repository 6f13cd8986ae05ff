"""Texts of strangers in messages: one line, of a length that somebody reads."""

from __future__ import annotations

_MOST = 2000  # characters
_END = 300  # of them at the end, where what to do is said


def shown(text: str, most: int = _MOST) -> str:
    """A text as one line without control characters; a long one is cut in its middle.

    A name in a file may have line breaks in it, or what a terminal takes for a command.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= most else f"{text[: most - _END - 5]} ... {text[-_END:]}"

"""SourceError: a source that leads nowhere."""

from __future__ import annotations

from jinfer.sandbox.sanitize import sanitized


class SourceError(ValueError):
    """A source that leads nowhere: says what was looked for, and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(sanitized(text))

"""SourceError, in a module of its own because commands import it before NumPy and JAX."""

from __future__ import annotations

from jinfer.sandbox.sanitize import sanitized


class SourceError(ValueError):
    """A source, or a file of it, that cannot be used: the message says why and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(sanitized(text))

"""Template errors, and the size of the text that a template may write."""

from jinfer.sandbox.sanitize import sanitized

MAX_CHARACTERS = 1 << 24


class TemplateError(ValueError):
    """A template that cannot be parsed, rejects its input, or exceeds the limits."""

    def __init__(self, text: str) -> None:
        super().__init__(sanitized(text))

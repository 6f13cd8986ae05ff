"""Template errors."""

from jinfer.sandbox.sanitize import sanitized


class TemplateError(ValueError):
    """A template that cannot be parsed, rejects its input, or exceeds the limits."""

    def __init__(self, text: str) -> None:
        super().__init__(sanitized(text))

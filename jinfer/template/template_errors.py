"""The one exception of this package."""

from jinfer.guard.sanitize import shown


class TemplateError(ValueError):
    """A template that cannot be read, that refuses its input, or that goes past the limits."""

    def __init__(self, text: str) -> None:
        super().__init__(shown(text))

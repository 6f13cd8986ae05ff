"""The one exception of this package."""


class TemplateError(ValueError):
    """A template that cannot be read, that refuses its input, or that goes past the limits."""

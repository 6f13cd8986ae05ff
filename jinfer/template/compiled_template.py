"""Compiled templates: rendered in this process, or in the sandbox process where that is needed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinfer.template import template_limits
from jinfer.template.render import compile_source, render
from jinfer.template.sandboxed_render import compile_in_sandbox, render_in_sandbox

_MAX_COMPILED_HERE = 1 << 15  # characters; the longest known template has half of that


class CompiledTemplate:
    """A template, rendered in this process until a rendering needs the sandbox process."""

    def __init__(self, source: str) -> None:
        """Compiles a template. Raises `TemplateError`."""
        self._source = source
        self._here = compile_source(source) if len(source) <= _MAX_COMPILED_HERE else None
        if self._here is None:
            compile_in_sandbox(source)

    def render(self, names: Mapping[str, Any]) -> str:
        """Renders it with its variables. Raises `TemplateError`."""
        here = self._here
        if here is not None:
            try:
                return render(here, names, template_limits.MAX_SECONDS, confined=False)
            except template_limits.NeedsSandbox:
                self._here = None
        return render_in_sandbox(self._source, names, template_limits.MAX_SECONDS)


# Conversations recreate their template for each answer.
compiled = lru_cache(maxsize=32)(CompiledTemplate)

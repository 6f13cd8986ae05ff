"""A specification as HTML: what a notebook shows of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from jinfer.spec.drawing import draw
from jinfer.spec.model import ModelSpec

_TABLE = "border-collapse:collapse;font:13px ui-monospace,Menlo,Consolas,monospace;margin:8px 0"


def spec_html(spec: ModelSpec) -> str:
    """The model's type, sizes and wiring."""
    sizes = [(name, value) for name, value in spec.dims.items() if value is not None]
    heading = f"<p><b>{escape(spec.path)}</b>: {spec.type}</p>"
    return f"<div>{heading}{table(('size', 'value'), sizes)}{draw(spec)}</div>"


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; numbers stand at the right."""

    def cells(row: Sequence[Any], tag: str) -> str:
        return "".join(
            f'<{tag} style="padding:2px 10px;text-align:'
            f'{"right" if isinstance(cell, int | float) else "left"}">{escape(str(cell))}</{tag}>'
            for cell in row
        )

    lines = [f"<tr>{cells(heads, 'th')}</tr>", *(f"<tr>{cells(row, 'td')}</tr>" for row in rows)]
    return f'<table style="{_TABLE}">{"".join(lines)}</table>'

"""HTML tables and collapsible sections of notebooks and reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_STYLE = "border-collapse:collapse;font:13px ui-monospace,Menlo,Consolas,monospace;margin:8px 0"


def table_html(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; numbers are right-aligned and rounded: 1e-05, not 9.99999975e-06."""

    def cells(row: Sequence[Any], tag: str) -> str:
        sides = ["right" if isinstance(cell, int | float) else "left" for cell in row]
        return "".join(
            f'<{tag} style="padding:2px 10px;text-align:{side}">{escape(rounded(cell))}</{tag}>'
            for cell, side in zip(row, sides, strict=True)
        )

    lines = [f"<tr>{cells(heads, 'th')}</tr>", *(f"<tr>{cells(row, 'td')}</tr>" for row in rows)]
    return f'<table style="{_STYLE}">{"".join(lines)}</table>'


def rounded(cell: Any) -> str:
    """A cell's text; a float in float32's precision."""
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def details_html(title: str, content: str, heading: str = "") -> str:
    """A collapsible section, perhaps below a heading.

    Args:
        title, heading: plain text.
        content: HTML.
    """
    details = f"<details><summary>{escape(title)}</summary>{content}</details>"
    return f"<div><p><b>{escape(heading)}</b></p>{details}</div>" if heading else details

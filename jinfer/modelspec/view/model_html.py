"""HTML view of a specification, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Protocol

from jinfer.modelspec.view.model_svg import Drawable, draw_model

_TABLE = "border-collapse:collapse;font:13px ui-monospace,Menlo,Consolas,monospace;margin:8px 0"


class HtmlViewable(Drawable, Protocol):
    """The part of a `ModelSpec` that is shown; the class itself imports this module."""

    @property
    def path(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def dims(self) -> Mapping[str, Any]: ...


def spec_html(spec: HtmlViewable) -> str:
    """HTML of the model's type, sizes and wiring."""
    sizes = [(name, value) for name, value in spec.dims.items() if value is not None]
    heading = f"<p><b>{escape(spec.path)}</b>: {spec.type}</p>"
    return f"<div>{heading}{table_html(('size', 'value'), sizes)}{draw_model(spec)}</div>"


def written(cell: Any) -> str:
    """A value as written, rounded to float32's precision."""
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def details_html(heading: str, title: str, content: str) -> str:
    """A heading and a collapsible section below it (details).

    Args:
        heading, title: plain text.
        content: HTML.
    """
    return (
        f"<div><p><b>{escape(heading)}</b></p><details><summary>{escape(title)}</summary>"
        f"{content}</details></div>"
    )


def table_html(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; numbers are right-aligned and rounded: 1e-05, not 9.99999975e-06."""

    def cells(row: Sequence[Any], tag: str) -> str:
        sides = ["right" if isinstance(cell, int | float) else "left" for cell in row]
        return "".join(
            f'<{tag} style="padding:2px 10px;text-align:{side}">{escape(written(cell))}</{tag}>'
            for cell, side in zip(row, sides, strict=True)
        )

    lines = [f"<tr>{cells(heads, 'th')}</tr>", *(f"<tr>{cells(row, 'td')}</tr>" for row in rows)]
    return f'<table style="{_TABLE}">{"".join(lines)}</table>'

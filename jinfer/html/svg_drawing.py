"""SVG drawings: a document with a background and colours for light and dark pages.

All text is monospaced, so the widths of boxes do not depend on the viewer's fonts.
"""

from __future__ import annotations

from html import escape

CHARACTER = 7.3  # width at font size 12; monospaced fonts have 0.55 to 0.602 of their size


def svg(
    name: str,
    width: float,
    height: float,
    content: str,
    *,
    style: str = "",
    dark: str = "",
    title: str = "",
) -> str:
    """A document with the classes `name` (bold text), `soft` (text) and `page` (background).

    Args:
        name: CSS class of the document, with which the rules of `style` begin: several documents
            on a page share their rules.
        width, height: pixels.
        content: SVG elements.
        style, dark: further CSS rules, and those for dark pages.
        title: plain text for screen readers.
    """
    text = "12px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace"
    rules = (
        f".{name} text{{font:{text};fill:#22262b}}.{name} .name{{font-weight:600}}"
        f".{name} .soft{{fill:#5c636d}}.{name} .page{{fill:#fcfcfb}}{style}"
        f"@media (prefers-color-scheme:dark){{.{name} text{{fill:#e4e6e9}}"
        f".{name} .soft{{fill:#a9b0ba}}.{name} .page{{fill:#1d1f22}}{dark}}}"
    )
    role = ' role="img"' if title else ""
    head = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{name}"{role} width="{width:.0f}" '
        f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">{head}'
        f'<style>{rules}</style><rect class="page" width="{width:.0f}" height="{height:.0f}"/>'
        f"{content}</svg>"
    )

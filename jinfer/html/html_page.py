"""Self-contained HTML and SVG: a view as a notebook's output, as a page, and as a picture.

Nothing is fetched: a page's own policy forbids it.
"""

from __future__ import annotations

from html import escape

from jinfer.html.live_script import LIVE
from jinfer.html.theme import STYLE

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

_STILL = ".jv output{display:none}.jv .scroll{overflow:hidden;max-height:none}"


def fragment(content: str) -> str:
    """Markup of a view with its stylesheet and script, for a notebook.

    Args:
        content: well-formed as XML.
    """
    return (
        f'<div class="jv"><style>{STYLE}</style>{content}'
        f"<script>//<![CDATA[\n{LIVE}//]]></script></div>"
    )


def page(title: str, content: str) -> str:
    """The same as a whole document."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title>"
        "<style>:root{color-scheme:light dark}body{margin:0;background:light-dark(#fbfaf7,#16181a)}"
        "</style></head>"
        f"<body>{fragment(content)}</body></html>\n"
    )


def picture(content: str, width: int, height: int) -> str:
    """The same as an SVG that browsers show as an image.

    Args:
        width, height: pixels that it takes.
    """
    size = f'width="{width}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}">'
        f"<style>{STYLE}{_STILL}</style>"
        f'<foreignObject {size}><div xmlns="http://www.w3.org/1999/xhtml" class="jv" '
        f'style="min-height:{height}px">{content}</div></foreignObject></svg>\n'
    )

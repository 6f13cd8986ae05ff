"""HTML pages: a view as a notebook's output, as a document, and as an SVG image.

Nothing is fetched: a page's own policy forbids it. Colours are those of the server's page. They
follow the system's setting, or a notebook's own (JupyterLab and Notebook, VS Code, Colab). A view
has a background, so its text is readable on any page.
"""

from __future__ import annotations

from html import escape

from jinfer.html.live_script import LIVE

MONO = "ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace"
SANS = "system-ui,-apple-system,'Segoe UI','Helvetica Neue','Liberation Sans',sans-serif"
MORE, LESS = "217 95 2", "59 110 165"  # shades of cells; ink is legible on them, light and dark
SHADE = 0.7  # of a whole shade

# Doubled class names outweigh the rules that notebooks have for tables in outputs.
STYLE = f"""
.jv{{color-scheme:light dark;--page:light-dark(#fbfaf7,#16181a);--raised:light-dark(#fff,#1f2225);
--sunken:light-dark(#f0eee8,#24282b);--line:light-dark(#d9d5cb,#3d4348);
--ink:light-dark(#1d2124,#e6e6e1);--faint:light-dark(#5f655f,#a0a69f);
--accent:light-dark(#2a6b59,#7fcbb2);--second:light-dark(#b0561b,#e8a468);--mono:{MONO};
box-sizing:border-box;padding:10px 14px 12px;border-radius:8px;
background:var(--page);color:var(--ink);font:14px/1.5 {SANS}}}
[data-jp-theme-light="true"] .jv,.vscode-light .jv,html[theme="light"] .jv{{color-scheme:light}}
[data-jp-theme-light="false"] .jv,.vscode-dark .jv,html[theme="dark"] .jv{{color-scheme:dark}}
.jv *{{box-sizing:border-box}}
.jv.jv p{{margin:0 0 6px;color:var(--faint);font-size:13px;overflow-wrap:anywhere}}
.jv.jv p.title{{color:var(--ink);font-size:14px;font-weight:600;margin:0}}
.jv output{{display:block;height:7.6em;overflow:auto;margin:0 0 8px;padding:2px 10px;
border-left:3px solid var(--line);font:12px/1.5 var(--mono);white-space:pre-wrap;
overflow-wrap:anywhere;color:var(--ink)}}
.jv output.few{{height:3.4em}}
.jv output:empty::before{{content:attr(data-hint);color:var(--faint)}}
.jv :focus-visible{{outline:2px solid var(--accent);outline-offset:-2px}}
.jv .scroll{{overflow:auto;max-width:100%;max-height:max(75vh,820px)}}
.jv.jv table{{border-collapse:separate;border-spacing:1px;margin:0;border:0;
font:12px/20px var(--mono);table-layout:auto}}
.jv.jv tbody tr,.jv.jv thead tr{{background:none;border:0}}
.jv.jv td,.jv.jv th{{height:22px;line-height:20px;padding:0 5px;border:0;overflow:hidden;
white-space:nowrap;text-overflow:ellipsis;text-align:left;vertical-align:middle;color:var(--ink);font-weight:400;
max-width:calc(var(--wide,9ch) + 10px);min-width:calc(var(--wide,9ch) + 10px);
unicode-bidi:isolate;border-radius:2px}}
.jv.jv th{{color:var(--faint);background:var(--page);position:sticky}}
.jv.jv thead th{{top:0;z-index:1;max-width:24ch}}
.jv.jv tbody th{{left:0;max-width:18ch;min-width:5ch}}
.jv.jv thead th:first-child{{left:0;z-index:2;max-width:18ch;min-width:5ch}}
.jv.jv td.number,.jv.jv th.number{{text-align:right}}
.jv.jv td.strong{{font-weight:700}}
.jv.jv [style*="--s:"]{{background:rgb({MORE}/calc(var(--s)*{SHADE}))}}
.jv.jv [style*="--n:"]{{background:rgb({LESS}/calc(var(--n)*{SHADE}))}}
.jv .text{{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.7 var(--mono);margin:4px 0;
padding:4px 10px;border-left:3px solid var(--line)}}
.jv .token{{unicode-bidi:isolate;border-radius:3px;box-shadow:inset -1px 0 var(--page)}}
.jv small{{font-size:12px;color:var(--faint);overflow-wrap:anywhere}}
"""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

_STILL = ".jv output{display:none}.jv .scroll{overflow:hidden;max-height:none}"


def fragment(content: str) -> str:
    """HTML of a view with its stylesheet and script, for a notebook.

    Args:
        content: HTML that is well-formed as XML.
    """
    return (
        f'<div class="jv"><style>{STYLE}</style>{content}'
        f"<script>//<![CDATA[\n{LIVE}//]]></script></div>"
    )


def page(title: str, content: str) -> str:
    """A view as a document."""
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
    """A view as an SVG that browsers show as an image.

    Args:
        width, height: size in pixels.
    """
    size = f'width="{width}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}">'
        f"<style>{STYLE}{_STILL}</style>"
        f'<foreignObject {size}><div xmlns="http://www.w3.org/1999/xhtml" class="jv" '
        f'style="min-height:{height}px">{content}</div></foreignObject></svg>\n'
    )

"""HTML pages, tables and pictures: a view as a notebook's output, a document, and an SVG image.

Nothing is fetched: a page's own policy forbids it. Colours are those of the server's page. They
follow the system's setting, or a notebook's own (JupyterLab and Notebook, VS Code, Colab). A view
has a background, so its text is readable on any page.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float

COLOUR = (217, 95, 2)  # red, green and blue of `matrix_png`
GAMMA = 0.5  # of opacity: small values are visible; `LIVE` inverts it

# Elements with `data-keys` (number of columns, or 0 for a text) have items with titles: Tab reaches
# one item, arrows move on. Elements with `data-heat` are images of matrices.
LIVE = """
for (const view of document.querySelectorAll('.jv:not([data-live])')) {
  view.dataset.live = '';
  const say = (part, text) => {
    const out = (part.closest('section') ?? view).querySelector('output');
    if (out) out.textContent = text;
  };
  for (const group of view.querySelectorAll('[data-keys]')) {
    const items = [...group.querySelectorAll('[title]')], wide = +group.dataset.keys || 0;
    const of = event => event.target.closest('[title]');
    for (const kind of ['mouseover', 'focusin']) group.addEventListener(kind, e => {
      const item = of(e);
      if (item) say(group, item.title);
    });
    group.addEventListener('keydown', e => {
      const at = items.indexOf(of(e)), row = wide ? at - at % wide : 0;
      const step = { ArrowRight: at + 1, ArrowLeft: at - 1,
        ArrowDown: at + (wide || 1), ArrowUp: at - (wide || 1),
        Home: row, End: wide ? row + wide - 1 : items.length - 1 }[e.key];
      if (at < 0 || step === undefined) return;
      e.preventDefault();
      const next = items[step];
      if (!next) return;
      items[at].tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
      next.scrollIntoView({ block: 'nearest', inline: 'nearest' });
    });
  }
  for (const heat of view.querySelectorAll('[data-heat]')) {
    const { rows, columns, scale, unit } = JSON.parse(heat.dataset.heat);
    const cross = heat.querySelector('i'), canvas = document.createElement('canvas');
    const draw = canvas.getContext('2d', { willReadFrequently: true });
    let at = [0, 0], source = '';
    const show = () => {
      const picture = getComputedStyle(heat).backgroundImage;
      const describe = () => {
        const alpha = draw.getImageData(at[1], at[0], 1, 1).data[3] / 255;
        const value = (scale * alpha ** (1 / GAMMA)).toFixed(3);
        say(heat, `${rows[at[0]]}\\n${columns[at[1]]}\\n${value} ${unit}`);
      };
      const wide = heat.clientWidth / columns.length, high = heat.clientHeight / rows.length;
      Object.assign(cross.style, { display: 'block', left: `${at[1] * wide}px`,
        top: `${at[0] * high}px`, width: `${wide}px`, height: `${high}px` });
      if (picture === source) return describe();
      const image = new Image();
      image.onload = () => {
        [canvas.width, canvas.height, source] = [image.width, image.height, picture];
        draw.drawImage(image, 0, 0);
        describe();
      };
      image.src = picture.slice(5, -2);
    };
    const bound = (value, most) => Math.max(0, Math.min(most - 1, value));
    heat.addEventListener('mousemove', e => {
      const box = heat.getBoundingClientRect();
      const y = (e.clientY - box.top) / box.height, x = (e.clientX - box.left) / box.width;
      at = [bound(Math.floor(y * rows.length), rows.length),
        bound(Math.floor(x * columns.length), columns.length)];
      show();
    });
    heat.addEventListener('focus', show);
    heat.addEventListener('keydown', e => {
      const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1],
        ArrowDown: [1, 0], ArrowUp: [-1, 0] }[e.key];
      if (!move) return;
      e.preventDefault();
      at = [bound(at[0] + move[0], rows.length), bound(at[1] + move[1], columns.length)];
      show();
    });
  }
}
""".replace("GAMMA", str(GAMMA))


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


def matrix_png(values: Float[np.ndarray, "rows columns"]) -> bytes:
    """A PNG with a pixel for each value, from 0 (transparent) to 1 (opaque)."""
    codes = np.round(255 * np.clip(np.nan_to_num(values), 0, 1)).astype(np.uint8)
    rows, columns = codes.shape
    lines = np.zeros((rows, columns + 1), np.uint8)  # each begins with its filter: none
    lines[:, 1:] = codes
    opacity = np.round(255 * (np.arange(256) / 255) ** GAMMA).astype(np.uint8)
    return b"".join(
        _chunks(
            (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)),
            (b"PLTE", bytes(COLOUR) * 256),
            (b"tRNS", opacity.tobytes()),
            (b"IDAT", zlib.compress(lines.tobytes(), 9)),
            (b"IEND", b""),
        )
    )


def data_uri(png: bytes) -> str:
    """An image as an address that contains it."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _chunks(*parts: tuple[bytes, bytes]) -> Iterator[bytes]:
    yield b"\x89PNG\r\n\x1a\n"
    for name, content in parts:
        checked = name + content
        yield struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


_TABLE = "border-collapse:collapse;font:13px ui-monospace,Menlo,Consolas,monospace;margin:8px 0"


def table_html(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; numbers are right-aligned and rounded: 1e-05, not 9.99999975e-06."""

    def cells(row: Sequence[Any], tag: str) -> str:
        sides = ["right" if isinstance(cell, int | float) else "left" for cell in row]
        return "".join(
            f'<{tag} style="padding:2px 10px;text-align:{side}">{escape(rounded(cell))}</{tag}>'
            for cell, side in zip(row, sides, strict=True)
        )

    lines = [f"<tr>{cells(heads, 'th')}</tr>", *(f"<tr>{cells(row, 'td')}</tr>" for row in rows)]
    return f'<table style="{_TABLE}">{"".join(lines)}</table>'


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

"""Heat maps: matrices of nonnegative values as small pictures and a large one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from jinfer.html.html_page import data_uri, matrix_png
from jinfer.html.token_text import visible
from jinfer.views.view import Drawn

if TYPE_CHECKING:
    from jaxtyping import Float

_SIDE, _SMALL = 600, 84  # pixels of the large picture, at least one a cell, and of a small one
_LARGEST = 32  # pixels of a cell
_LINE = 12  # pixels of a name
_LABEL = 92  # pixels of the names at the sides
_NAME = 40  # columns of a name in a title
_HINT = "a value: point at it, or go to the picture with Tab and move with arrows"
_STYLE = f"""
.jv .maps{{position:relative}}
.jv .maps>input{{position:absolute;opacity:0;width:1px;height:1px;margin:0}}
.jv .small{{display:flex;flex-wrap:wrap;gap:6px;margin-bottom:8px}}
.jv .small label{{font:11px/16px var(--mono);text-align:center;cursor:pointer;padding:3px;
border:2px solid transparent;border-radius:5px}}
.jv .small b{{display:block;width:{_SMALL}px;height:{_SMALL}px;border:1px solid var(--line);
background-size:100% 100%;image-rendering:pixelated}}
.jv .map{{max-height:none;display:grid;grid-template-columns:{_LABEL}px max-content}}
.jv .map span{{overflow:hidden;white-space:nowrap;text-overflow:ellipsis;
font:10px/{_LINE}px var(--mono);color:var(--faint);unicode-bidi:isolate}}
.jv .across{{grid-column:2;display:flex;align-items:flex-end;padding-bottom:4px}}
.jv .across span{{writing-mode:vertical-rl;transform:rotate(180deg);flex:none;
max-height:{_LABEL}px}}
.jv .down{{padding-right:4px;text-align:right}}
.jv .down span{{display:block}}
.jv .large{{position:relative;border:1px solid var(--line);background-size:100% 100%;
image-rendering:pixelated;box-sizing:content-box}}
.jv .large i{{display:none;position:absolute;border:1px solid var(--ink)}}
"""


@dataclass(frozen=True)
class Matrix:
    """A matrix.

    Attributes:
        name: in a few characters.
        title: a description, on hover.
        values: from 0 on.
    """

    name: str
    title: str
    values: Float[np.ndarray, "rows columns"]


def heat_maps(
    matrices: Sequence[Matrix], rows: Sequence[str], columns: Sequence[str], unit: str
) -> Drawn:
    """Small pictures, and below them the chosen one with the names of rows and columns.

    Which one is chosen needs no script: a group of radio buttons, as the keyboard knows them.

    Args:
        rows, columns: names, as texts of tokens.
        unit: what a value is, such as "attention".
    """
    scale = max((float(np.max(matrix.values, initial=0)) for matrix in matrices), default=0) or 1.0
    pictures = [data_uri(matrix_png(matrix.values / scale)) for matrix in matrices]
    group = "m" + hashlib.sha256("".join(pictures).encode()).hexdigest()[:10]
    across, down = (min(_LARGEST, max(1, _SIDE // len(names))) for names in (columns, rows))
    wide, high = across * len(columns), down * len(rows)
    about = {"rows": _said(rows), "columns": _said(columns), "scale": scale, "unit": unit}
    several = len(matrices) > 1
    markup = (
        f"<style>{_STYLE}{''.join(_rules(group, pictures, wide, high))}</style>"
        f'<section><output data-hint="{_HINT}" style="height:5em"></output>'
        f'<div id="{group}" class="maps">'
        + "".join(_radio(group, at, matrix.name) for at, matrix in enumerate(matrices))
        + f'<div class="small">{"".join(_labels(group, matrices)) if several else ""}</div>'
        f'<div class="scroll map"><div class="across">{_names(columns, across, "width")}</div>'
        f'<div class="down">{_names(rows, down, "height")}</div>'
        f'<div class="large" tabindex="0" role="img" aria-label="{escape(unit)}" '
        f'data-heat="{escape(json.dumps(about, ensure_ascii=False))}"><i></i></div></div></div>'
        "</section>"
    )
    lines = -(-len(matrices) // (_SIDE // (_SMALL + 18))) if several else 0
    return Drawn(markup, _LABEL + wide + 20, _LABEL + high + lines * (_SMALL + 36) + 16)


def _rules(group: str, pictures: Sequence[str], wide: int, high: int) -> Iterator[str]:
    """Each picture once, and which one is shown large."""
    yield f"#{group} .large{{width:{wide}px;height:{high}px}}"
    yield f"#{group}{{{''.join(f'--{at}:url("{uri}");' for at, uri in enumerate(pictures))}}}"
    for at in range(len(pictures)):
        button, label = f"#{group}-{at}", f"label[for={group}-{at}]"
        yield f"{button}:checked~.map .large{{background-image:var(--{at})}}"
        yield f"{button}:checked~.small {label}{{border-color:var(--second)}}"
        yield f"{button}:focus-visible~.small {label}{{outline:2px solid var(--accent)}}"


def _radio(group: str, at: int, name: str) -> str:
    checked = "" if at else ' checked="checked"'
    return (
        f'<input type="radio" name="{group}" id="{group}-{at}" '
        f'aria-label="{escape(name)}"{checked}/>'
    )


def _labels(group: str, matrices: Sequence[Matrix]) -> Iterator[str]:
    for at, matrix in enumerate(matrices):
        picture = f'<b style="background-image:var(--{at})"></b>'
        title, name = escape(matrix.title), escape(matrix.name)
        yield f'<label for="{group}-{at}" title="{title}">{picture}{name}</label>'


def _names(names: Sequence[str], cell: int, side: str) -> str:
    """Names next to their cells, or of every so many where there is no room for all."""
    every = -(-_LINE // cell)
    shown = []
    for at in range(0, len(names), every):
        size = cell * min(every, len(names) - at)
        name = escape(visible(names[at], 14))
        fits = name if size >= _LINE else ""
        line = f"line-height:{size}px" if side == "height" or size >= _LINE else ""
        shown.append(f'<span style="{side}:{size}px;{line}">{fits}</span>')
    return "".join(shown)


def _said(names: Sequence[str]) -> list[str]:
    return [f"{at} {visible(name, _NAME)}" for at, name in enumerate(names)]

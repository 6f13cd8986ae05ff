"""Cell grid: a table of shaded cells whose rows and columns have names; arrows move in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from jinfer.views.view import Drawn

_ROW, _CHARACTER, _SPACE = 23, 7.3, 11  # pixels of a row, of a character, and around a cell's text
_NAME = 150  # pixels of the names of rows, at most
_HINT = "a cell's numbers: point at it, or go to it with Tab and arrows"


@dataclass(frozen=True)
class Cell:
    """A cell.

    Attributes:
        text: in one line, cut to the cell.
        title: a description, in a few lines, shown when the cell is chosen.
        shade: from -1 (blue) to 1 (orange).
        strong: whether it is bold.
    """

    text: str
    title: str
    shade: float = 0.0
    strong: bool = False


def cell_grid(
    corner: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[Cell | None]]],
    *,
    wide: int = 9,
    number: bool = False,
    few: bool = True,
) -> Drawn:
    """A grid.

    Args:
        corner: what the names of the rows are.
        columns: names of the columns, as they can be shown.
        rows: name and cells; None: an empty cell.
        wide: characters of a cell.
        number: whether cells are numbers, which are right-aligned.
        few: whether titles have one line; else they have up to six.
    """
    kind = ' class="number"' if number else ""
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name in columns)
    lines, first = list[str](), True
    for name, cells in rows:
        drawn = []
        for cell in cells:
            if cell is None:
                drawn.append('<td title=""></td>')  # a place to move through
                continue
            drawn.append(_cell(cell, number, first))
            first = False
        lines.append(f"<tr><th>{escape(name)}</th>{''.join(drawn)}</tr>")
    kind = "few" if few else ""
    markup = (
        f'<section><output class="{kind}" data-hint="{escape(_HINT)}"></output>'
        f'<div class="scroll"><table style="--wide:{wide}ch" data-keys="{len(columns)}">'
        f"<thead><tr><th>{escape(corner)}</th>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div></section>"
    )
    width = _NAME + round(len(columns) * (wide * _CHARACTER + _SPACE))
    return Drawn(markup, width, _ROW * (len(rows) + 1) + 8)


def _cell(cell: Cell, number: bool, first: bool) -> str:
    kinds = " ".join(["number"] * number + ["strong"] * cell.strong)
    kind = f' class="{kinds}"' if kinds else ""
    size = f"{abs(cell.shade):.2f}".removeprefix("0")
    shade = f' style="--{"s" if cell.shade > 0 else "n"}:{size}"' if float(size) else ""
    tab = ' tabindex="0"' if first else ""
    return f'<td{kind}{shade}{tab} title="{escape(cell.title)}">{escape(cell.text)}</td>'

"""Cell grid: a table of shaded cells whose rows and columns have names; arrows move in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from jinfer.views.view import Drawn

_ROW, _CHARACTER, _BESIDE = 23, 7.3, 11  # pixels of a row, a character, and beside a cell's text
_NAME = 150  # pixels of the names of rows, at most
_HINT = "a cell's numbers: point at it, or go to it with Tab and arrows"


@dataclass(frozen=True)
class Cell:
    """A cell.

    Attributes:
        text: in one line, cut to the cell.
        said: what is said when it is chosen, in a few lines.
        shade: from -1 (blue) to 1 (orange).
        strong: whether it is bold.
    """

    text: str
    said: str
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
        rows: name and cells; None: an empty one.
        wide: characters of a cell.
        number: whether cells are numbers, which stand right.
        few: whether what is said of a cell is one line; else it is up to six.
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
    said = "few" if few else ""
    markup = (
        f'<section><output class="{said}" data-hint="{escape(_HINT)}"></output>'
        f'<div class="scroll"><table style="--wide:{wide}ch" data-keys="{len(columns)}">'
        f"<thead><tr><th>{escape(corner)}</th>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div></section>"
    )
    width = _NAME + round(len(columns) * (wide * _CHARACTER + _BESIDE))
    return Drawn(markup, width, _ROW * (len(rows) + 1) + 8)


def _cell(cell: Cell, number: bool, first: bool) -> str:
    kinds = " ".join(["number"] * number + ["strong"] * cell.strong)
    kind = f' class="{kinds}"' if kinds else ""
    size = f"{abs(cell.shade):.2f}".removeprefix("0")
    shade = f' style="--{"s" if cell.shade > 0 else "n"}:{size}"' if float(size) else ""
    tab = ' tabindex="0"' if first else ""
    return f'<td{kind}{shade}{tab} title="{escape(cell.said)}">{escape(cell.text)}</td>'

"""Cell grid: a table of shaded cells with named rows and columns, and the view of any matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from jinfer.html.token_text import clipped, columns_of, visible
from jinfer.sampling.request_errors import RequestError
from jinfer.views.view import Drawn, View

if TYPE_CHECKING:
    from jaxtyping import Float

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


_HEAD, _LEAST_WIDTH = 12, 7  # columns of a name, and of a cell


def grid(
    values: Float[np.ndarray, "rows columns"],
    rows: Sequence[object],
    columns: Sequence[object],
    title: str = "values",
) -> View:
    """A matrix, shaded from its least (blue) to its greatest value (orange), zero not shaded.

    Args:
        rows, columns: names, such as those of layers and tokens.
        title: what it shows, such as "logit of Paris by patched place".

    Raises:
        RequestError: it is no matrix, or has other numbers of names.
    """
    matrix = np.asarray(values, np.float64)
    row_names, column_names = [*map(str, rows)], [*map(str, columns)]
    if matrix.shape != (len(row_names), len(column_names)):
        shape = " × ".join(map(str, matrix.shape))
        raise RequestError(
            f"the values are {shape}, and there are {len(row_names)} × {len(column_names)} names"
        )
    largest = float(np.max(np.abs(matrix), initial=0, where=np.isfinite(matrix))) or 1.0
    digits = max(0, min(6, 2 - math.floor(math.log10(largest))))  # three of the greatest value
    heads = [clipped(_label(name), _HEAD) for name in column_names]

    def cell(row: str, column: str, value: float) -> Cell:
        shade = value / largest if np.isfinite(value) else 0.0
        return Cell(f"{value:z.{digits}f}", f"{_label(row)}, {_label(column)}: {value:.6g}", shade)

    listed = [
        (
            _label(row),
            [cell(row, *place) for place in zip(column_names, line.tolist(), strict=True)],
        )
        for row, line in zip(row_names, matrix, strict=True)
    ]
    texts = [cell.text for _, cells in listed for cell in cells]
    wide = max([_LEAST_WIDTH, *map(columns_of, heads), *map(len, texts)])
    drawn = cell_grid("", heads, listed, wide=wide, number=True)
    finite = matrix[np.isfinite(matrix)]
    least, greatest = finite.min(initial=0), finite.max(initial=0)
    about = f"{len(row_names)} × {len(column_names)} values, from {least:.4g} to {greatest:.4g}"
    count = len(column_names)
    return View(
        title,
        about,
        drawn,
        lambda: {
            "row": np.repeat(np.array(row_names, object), count),
            "column": np.tile(np.array(column_names, object), len(row_names)),
            "value": matrix.ravel(),
        },
    )


def _label(name: str) -> str:
    """A name with marks for the spaces at its ends, which tokens have, but none between words."""
    words = name.strip(" ")
    before = name[: name.find(words)]
    after = name[len(before) + len(words) :]
    inside = " ".join(visible(word) for word in words.split(" "))
    return visible(before) + inside + visible(after)

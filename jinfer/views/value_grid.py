"""Value grid: a matrix of your own numbers with names of rows and columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jinfer.html.token_text import clipped, columns_of, visible
from jinfer.sampling.request_errors import RequestError
from jinfer.views.cell_grid import Cell, cell_grid
from jinfer.views.view import View

if TYPE_CHECKING:
    from jaxtyping import Float

_NAME, _LEAST = 12, 7  # columns of a name, and of a cell


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
    most = float(np.max(np.abs(matrix), initial=0, where=np.isfinite(matrix))) or 1.0
    digits = max(0, min(6, 2 - math.floor(math.log10(most))))  # three of the greatest value
    heads = [clipped(_label(name), _NAME) for name in column_names]

    def cell(row: str, column: str, value: float) -> Cell:
        shade = value / most if np.isfinite(value) else 0.0
        return Cell(f"{value:z.{digits}f}", f"{_label(row)}, {_label(column)}: {value:.6g}", shade)

    listed = [
        (_label(row), [cell(row, *each) for each in zip(column_names, line.tolist(), strict=True)])
        for row, line in zip(row_names, matrix, strict=True)
    ]
    texts = [cell.text for _, cells in listed for cell in cells]
    wide = max([_LEAST, *map(columns_of, heads), *map(len, texts)])
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

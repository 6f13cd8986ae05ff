"""Direct logit attribution: what each layer, feed-forward and head adds to a token's logit.

The residual stream is a sum, and with the final norm's scale held fixed so is a logit (arXiv
2211.00593; "A Mathematical Framework for Transformer Circuits", 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jinfer.html.token_text import visible
from jinfer.views.cell_grid import Cell, cell_grid
from jinfer.views.view import Table, View

if TYPE_CHECKING:
    from jaxtyping import Float

_TOKEN = 24  # columns of a token


@dataclass(frozen=True)
class Attribution:
    """A logit, or the difference of two, as a sum.

    Attributes:
        what: it is: "logit of ␣Paris", at which position.
        embed: of the stream before the first layer.
        parts: names of what layers add, such as "attn" and "ffn".
        values: what each adds; nan: the layer has no such part.
        heads: what each head adds to its attention's part; nan: heads do not add up there.
        constant: of biases of norm and head.
        logit: as the model gave it.
    """

    what: str
    embed: float
    parts: Sequence[str]
    values: Float[np.ndarray, "layers parts"]
    heads: Float[np.ndarray, "layers heads"]
    constant: float
    logit: float

    @property
    def layers(self) -> Float[np.ndarray, " layers"]:
        """What each layer adds."""
        return np.nansum(self.values, axis=1)

    @property
    def total(self) -> float:
        """The sum of all parts: the logit but for rounding."""
        return float(self.embed + self.layers.sum() + self.constant)


def draw_attribution(found: Attribution) -> View:
    """The view of an attribution: a row for each layer, a column for each head and part."""
    layers, heads = found.heads.shape
    everything = np.concatenate(
        [found.values.ravel(), found.heads.ravel(), found.layers, [found.embed, found.constant]]
    )
    most = float(np.nanmax(np.abs(everything), initial=0)) or 1.0

    def cell(value: float, title: str) -> Cell | None:
        if np.isnan(value):
            return None
        return Cell(f"{value:+z.2f}", f"{title}: {value:+.4f}", value / most)

    empty: list[Cell | None] = [None] * (heads + len(found.parts))
    rows: list[tuple[str, Sequence[Cell | None]]] = [
        ("embed", [*empty, cell(found.embed, "embedding")])
    ]
    for at in range(layers):
        cells = [cell(v, f"layer {at}, head {h}") for h, v in enumerate(found.heads[at])]
        named = zip(found.parts, found.values[at], strict=True)
        cells += [cell(value, f"layer {at}, {part}") for part, value in named]
        rows.append((str(at), [*cells, cell(found.layers[at], f"layer {at}")]))
    if found.constant:
        rows.append(("biases", [*empty, cell(found.constant, "biases of norm and head")]))
    total = Cell(f"{found.total:+.2f}", f"sum of all parts: {found.total:+.4f}", strong=True)
    rows.append(("sum", [*empty, total]))
    columns = [*(f"h{h}" for h in range(heads)), *found.parts, "layer"]
    about = f"{found.what} = {found.logit:+.3f}; parts add up to {found.total:+.3f}"
    grid = cell_grid("layer", columns, rows, wide=max(6, *map(len, columns)) + 1, number=True)
    return View("direct logit attribution", about, grid, lambda: _table(found))


def token_label(text: str) -> str:
    """A token as attributions name it."""
    return visible(text, _TOKEN)


def _table(found: Attribution) -> Table:
    rows: list[tuple[int | None, str, int | None, float]] = [(None, "embed", None, found.embed)]
    for at in range(len(found.values)):
        rows += [
            (at, part, None, float(value))
            for part, value in zip(found.parts, found.values[at], strict=True)
            if not np.isnan(value)
        ]
        rows += [
            (at, "head", head, float(value))
            for head, value in enumerate(found.heads[at])
            if not np.isnan(value)
        ]
    rows.append((None, "biases", None, found.constant))
    names = ("layer", "part", "head", "logit")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))

"""Activation outliers: how far the largest activation of each layer is above the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jinfer.html.token_text import visible
from jinfer.views.cell_grid import Cell, cell_grid
from jinfer.views.view import Table, View

if TYPE_CHECKING:
    from jaxtyping import Float

    from jinfer.api.llm import LLM
    from jinfer.api.prompt_inputs import Prompt

_NAME = 30  # columns of a token


@dataclass(frozen=True)
class Outlier:
    """The largest activation of a place.

    Attributes:
        value: of greatest size.
        ratio: its size over the root mean square of its token's vector.
        token, dimension: where it is.
    """

    value: float
    ratio: float
    token: int
    dimension: int


def outliers(llm: LLM, prompt: Prompt) -> View:
    """The outliers of the residual stream and of what each module is given.

    What is given to a matrix is what quantized activations round: an outlier takes the others'
    precision.

    Raises:
        RequestError: an invalid prompt, or an encoder-decoder.
    """
    from jinfer.modelspec.blocks import LayerNormSpec, RMSNormSpec
    from jinfer.views.token_likelihoods import token_names
    from jinfer.views.traced_values import captured, looked_into, names_like

    stack = looked_into(llm)
    kinds = {
        f"{stack.name}.{at}.{name}": block
        for at, layer in enumerate(stack.layers)
        for name, block in layer.modules
    }
    names = [
        name
        for name in names_like(llm, stack.name + r"\.\d+\.(x|[^.]+\.input)")
        if not isinstance(kinds.get(name.removesuffix(".input")), RMSNormSpec | LayerNormSpec)
    ]
    ids = llm.encode(prompt)
    found = captured(llm, ids, names)
    places = {name: largest(value.reshape(len(ids), -1)) for name, value in found.items()}
    return draw_outliers(places, token_names(llm, ids))


def largest(values: Float[np.ndarray, "tokens width"]) -> Outlier:
    """The value with the largest ratio to the root mean square of its vector."""
    size = np.abs(values)
    ratios = size.max(axis=1) / np.maximum(np.sqrt((values.astype(np.float64) ** 2).mean(1)), 1e-30)
    token = int(np.argmax(ratios))
    dimension = int(np.argmax(size[token]))
    return Outlier(float(values[token, dimension]), float(ratios[token]), token, dimension)


def draw_outliers(places: Mapping[str, Outlier], tokens: Sequence[str]) -> View:
    """The view of outliers: a row for each layer, a column for each place.

    Args:
        places: by names such as "decoder.3.x" and "decoder.3.ffn.input".
    """
    stack = next(iter(places), "decoder").partition(".")[0]
    rows: dict[str, dict[str, Outlier]] = {}
    for name, outlier in places.items():
        _, layer, place = name.split(".", 2)
        rows.setdefault(layer, {})[place] = outlier
    columns = list(dict.fromkeys(place for row in rows.values() for place in row))
    max_ratio = max((outlier.ratio for outlier in places.values()), default=0) or 1.0

    def cell(name: str, outlier: Outlier | None) -> Cell | None:
        if outlier is None:
            return None
        token = f"{outlier.token} {visible(tokens[outlier.token], _NAME)}"
        place = f"{name}: {outlier.value:.4g} at {token}, dimension {outlier.dimension}"
        title = f"{place}; {outlier.ratio:.1f} × rms"
        return Cell(f"{outlier.ratio:.1f}", title, outlier.ratio / max_ratio)

    listed = [
        (layer, [cell(f"{stack}.{layer}.{place}", row.get(place)) for place in columns])
        for layer, row in rows.items()
    ]
    about = (
        f"{len(rows)} layers, {len(tokens)} tokens; the largest activation, in root mean squares "
        "of its token's vector"
    )
    wide = max(7, *(len(name) + 1 for name in columns)) if columns else 7
    grid = cell_grid("layer", columns, listed, wide=wide, number=True)
    return View("activation outliers", about, grid, lambda: _table(places, tokens))


def _table(places: Mapping[str, Outlier], tokens: Sequence[str]) -> Table:
    outliers = list(places.values())
    return {
        "name": list(places),
        "value": [outlier.value for outlier in outliers],
        "ratio": [outlier.ratio for outlier in outliers],
        "position": [outlier.token for outlier in outliers],
        "token": [tokens[outlier.token] for outlier in outliers],
        "dimension": [outlier.dimension for outlier in outliers],
    }

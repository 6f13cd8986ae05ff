"""Figures of benchmarks: medians and ratios of rounds, tables, and plots."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from jinfer.loader.sources import SourceError


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median ("ratio"), and the extremes."""
    return {"ratio": statistics.median(values), "least": min(values), "most": max(values)}


def spread_text(values: Mapping[str, float]) -> str:
    """Such as "1.02 (0.98-1.05)"."""
    return f"{values['ratio']:.2f} ({values['least']:.2f}-{values['most']:.2f})"


def row(cells: Iterable[object]) -> str:
    """A row of a table as Markdown."""
    return "|" + "".join(f" {cell} |" if cell != "" else " |" for cell in cells)


def table(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table as Markdown."""
    return "\n".join([row(heads), "|" + "---|" * len(heads), *map(row, rows)])


def check_plot(path: str | None) -> None:
    """Raises `SourceError` if a plot is to be drawn and cannot be."""
    if path and find_spec("matplotlib") is None:
        raise SourceError("--svg: matplotlib is missing; pip install 'jinfer[plots]'")


@contextmanager
def plot(path: str, *shape: int, **how: Any) -> Iterator[Any]:
    """Axes of `pyplot.subplots` in a figure that is written as SVG or PNG."""
    import matplotlib as mpl

    mpl.use("svg" if path.endswith("svg") else "agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(*shape, layout="constrained", **how)
    yield axes
    figure.savefig(path)
    plt.close(figure)

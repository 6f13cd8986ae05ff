"""Speculative decoding plot: speedup over plain decoding, by acceptance rate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DraftGain:
    """A way of drafting relative to plain decoding.

    Attributes:
        name: of the drafter.
        streams: parallel answers.
        ratios: seconds without drafts over seconds with them, of each round.
        calls, tokens: of one round: tokens beyond the first of each answer.
        accepted, drafted: tokens of drafts.
        accuracy: the probability that a replayed token is right; None: not replayed.
        nodes: draft tokens per call; None: as many as pay off.
        formula: expected tokens per call, if known.
    """

    name: str
    streams: int
    ratios: list[float]
    calls: float
    tokens: int
    accepted: int
    drafted: int
    accuracy: float | None = None
    nodes: int | None = None
    formula: float | None = None

    @property
    def middle(self) -> float:
        """The median ratio."""
        return statistics.median(self.ratios)

    def line(self) -> str:
        """A row of the table."""
        right = f"{self.accepted / self.drafted:.2f}" if self.drafted else ""
        formula = "" if self.formula is None else f"{self.formula:.2f}"
        gain = f"{self.middle:.2f} ({min(self.ratios):.2f}-{max(self.ratios):.2f})"
        rate = self.tokens / self.calls
        return f"| {self.name} | {self.streams} | {rate:.2f} | {formula} | {right} | {gain} |"


def drawing(gains: Sequence[DraftGain], path: str, title: str = "") -> None:
    """Replayed drafts as lines with the rounds' extremes, all others as bars; an SVG or PNG."""
    import matplotlib as mpl

    mpl.use("svg" if path.endswith("svg") else "agg")
    import matplotlib.pyplot as plt

    replayed = [gain for gain in gains if gain.accuracy is not None]
    others = [gain for gain in gains if gain.accuracy is None]
    widths = [3, 1] if others else [1]
    figure, axes = plt.subplots(
        1, len(widths), figsize=(9, 3.4), layout="constrained", width_ratios=widths, squeeze=False
    )
    lines = axes[0, 0]
    for streams, nodes in dict.fromkeys((gain.streams, gain.nodes) for gain in replayed):
        own = sorted(
            (gain for gain in replayed if (gain.streams, gain.nodes) == (streams, nodes)),
            key=lambda gain: gain.accuracy or 0.0,
        )
        label = f"{nodes or 'as many as pay'}{'' if streams == 1 else f', {streams} streams'}"
        lines.errorbar(
            [gain.accuracy or 0.0 for gain in own],
            [gain.middle for gain in own],
            [
                [gain.middle - min(gain.ratios) for gain in own],
                [max(gain.ratios) - gain.middle for gain in own],
            ],
            fmt="o-",
            capsize=3,
            label=label,
        )
    lines.set_xlabel("chance that a drafted token is right")
    lines.set_ylabel("times plain decoding")
    if replayed:
        lines.legend(title="nodes of a call", fontsize="small")
    if others:
        bars = axes[0, 1]
        bars.bar([gain.name.replace(", ", ",\n") for gain in others], [g.middle for g in others])
        bars.axhline(1.0, color="grey", linestyle=":")
    lines.axhline(1.0, color="grey", linestyle=":")
    figure.suptitle(title)
    figure.savefig(path)
    plt.close(figure)

"""Load test statistics: TTFT, inter-token latency and throughput as a table, JSON and a drawing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

PERCENTILES = (50, 90, 95, 99)


@dataclass
class AnswerTimes:
    """One answer, in seconds from the start of its load.

    Attributes:
        begun: when it was requested.
        times: arrival times of its chunks.
        tokens: of the answer: as the server reports, otherwise its chunks.
        prompt, cached: prompt tokens, and how many of them the server had cached.
        error: why there is none.
    """

    begun: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt: int = 0
    cached: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        """Time to first chunk (TTFT)."""
        return self.times[0] - self.begun

    @property
    def between(self) -> float:
        """Mean time between tokens (TPOT)."""
        return (self.times[-1] - self.times[0]) / max(self.tokens - 1, 1)


@dataclass(frozen=True)
class LatencyLimits:
    """Service level objectives, in seconds; None: unlimited."""

    first: float | None = None
    between: float | None = None

    def kept(self, answer: AnswerTimes) -> bool:
        """Whether an answer meets them."""
        return answer.first <= (self.first or math.inf) and answer.between <= (
            self.between or math.inf
        )


@dataclass(frozen=True)
class LoadResult:
    """A load and its results.

    Attributes:
        load: its name in tables.
        offered: requests per second, or clients.
        answers, failed: number of answers and of failures.
        seconds: from the first request to the end of the last answer.
        requests, tokens, prompts: per second: answers, their tokens, tokens of their prompts.
        good: answers per second within the limits (goodput).
        cached: share of the prompt tokens that the server had cached.
        first, between, gap, whole: percentiles in seconds: time to first token; mean time between
            tokens; time between two chunks; whole answer.
        errors: error messages and their counts.
    """

    load: str
    offered: float
    answers: int
    failed: int
    seconds: float
    requests: float
    tokens: float
    prompts: float
    good: float
    cached: float
    first: Mapping[str, float]
    between: Mapping[str, float]
    gap: Mapping[str, float]
    whole: Mapping[str, float]
    errors: Mapping[str, int]


def figures(
    load: str, offered: float, answers: Sequence[AnswerTimes], limits: LatencyLimits
) -> LoadResult:
    """The results of one load."""
    done = [each for each in answers if each.error is None and each.times]
    errors: dict[str, int] = {}
    for each in answers:
        if each.error is not None or not each.times:
            why = each.error or "an empty answer"
            errors[why] = errors.get(why, 0) + 1
    begun = min((each.begun for each in answers), default=0.0)
    seconds = max((each.times[-1] for each in done), default=begun) - begun or math.inf
    prompts = sum(each.prompt for each in done)
    return LoadResult(
        load,
        offered,
        len(done),
        len(answers) - len(done),
        seconds if math.isfinite(seconds) else 0.0,
        len(done) / seconds,
        sum(each.tokens for each in done) / seconds,
        prompts / seconds,
        sum(map(limits.kept, done)) / seconds,
        sum(each.cached for each in done) / prompts if prompts else 0.0,
        percentiles([each.first for each in done]),
        percentiles([each.between for each in done if each.tokens > 1]),
        percentiles([b - a for each in done for a, b in pairwise(each.times)]),
        percentiles([each.times[-1] - each.begun for each in done]),
        errors,
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The value that so many percent do not exceed: one of the values; 0 if there are none."""
    ordered = sorted(values)
    return {
        f"p{share}": ordered[max(math.ceil(share / 100 * len(ordered)) - 1, 0)] if ordered else 0.0
        for share in PERCENTILES
    }


def table(rows: Sequence[LoadResult]) -> str:
    """A row for each load."""
    heads = ["load", "answers", "failed", "requests/s", "good/s", "tokens/s", "prompt tokens/s"]
    heads += ["cached", "first token p50 / p95 / p99 ms", "between tokens p50 / p95 / p99 ms"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [row.load, f"{row.answers}", f"{row.failed}", f"{row.requests:.2f}"]
        cells += [f"{row.good:.2f}", f"{row.tokens:.1f}", f"{row.prompts:.0f}"]
        cells += [f"{row.cached:.0%}", _three(row.first), _three(row.between)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _three(found: Mapping[str, float]) -> str:
    return " / ".join(f"{1e3 * found[name]:.1f}" for name in ("p50", "p95", "p99"))


def record(rows: Sequence[LoadResult], about: Mapping[str, Any]) -> dict[str, Any]:
    """All results as JSON values."""
    return {**about, "loads": [asdict(row) for row in rows]}


def drawing(rows: Sequence[LoadResult], path: str, unit: str) -> None:
    """Throughput and latency over load, as an SVG or PNG."""
    import matplotlib as mpl

    mpl.use("svg" if path.endswith("svg") else "agg")
    import matplotlib.pyplot as plt

    figure, (rates, waiting) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    offered = [row.offered for row in rows]
    rates.plot(offered, [row.requests for row in rows], "o-", label="answers/s")
    rates.plot(offered, [row.good for row in rows], "s--", label="within the limits/s")
    for name in ("p50", "p95"):
        first = [1e3 * row.first[name] for row in rows]
        between = [1e3 * row.between[name] for row in rows]
        waiting.plot(offered, first, "o-", label=f"first token {name}")
        waiting.plot(offered, between, "s--", label=f"between tokens {name}")
    waiting.set_yscale("log")
    waiting.set_ylabel("milliseconds")
    for axes in (rates, waiting):
        axes.set_xlabel(unit)
        axes.legend(fontsize="small")
    figure.savefig(path)
    plt.close(figure)

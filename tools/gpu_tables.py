"""Tables of `make gpu`'s results, in Markdown, as docs/benchmarks.md has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LARGE = {"yi_34b": "Yi 34B", "falcon_40b": "Falcon 40B"}


def tables(found: Mapping[str, Any]) -> str:
    """All tables that the results have figures for.

    Args:
        found: the JSON of `gpu_check.check`.
    """
    parts = found["parts"]
    lines = [f"### {found['device']}", ""]
    figures = {name: part["figures"] for name, part in parts.items() if "figures" in part}
    for make in (_programs, _large, _offload):
        lines += make(figures)
    lines += [f"{name}: {_tests(part)}" for name, part in parts.items() if "tests" in part]
    failed = [name for name, part in parts.items() if part["status"] != 0]
    return "\n".join([*lines, *(f"{name} failed or took too long" for name in failed)])


def _programs(figures: Mapping[str, Any]) -> Iterator[str]:
    if "programs" not in figures:
        return
    first = figures["programs"]
    copied, multiplied = first["copy"] / 1e12, first["matmul"] / 1e12
    yield f"Copies {copied:.2f} TB/s, bf16 matmuls {multiplied:.0f} TFLOP/s."
    yield from ("", "| | tokens/s | share |", "|---|---|---|")
    for row in first["programs"]:
        kind, count = row["task"].split("-")
        share = row["of_matmul"] if kind == "prompt" else row["of_copy"]
        rate = int(count) / row["seconds"]
        yield f"| {row['format']}, {kind}, {count} | {rate:,.0f} | {share:.0%} |"
    yield ""


def _large(figures: Mapping[str, Any]) -> Iterator[str]:
    for name, title in _LARGE.items():
        if name in figures:
            rows = {row["task"]: row for row in figures[name]["programs"]}
            rates = [f"{task} {_rate(row):,.0f} tokens/s" for task, row in rows.items()]
            peak = figures[name]["peak_bytes"] / (1 << 30)
            yield f"{title} in {peak:.1f} GiB at most: {', '.join(rates)}"
            yield ""


def _rate(row: Mapping[str, Any]) -> float:
    return float(int(row["task"].split("-")[1]) / row["seconds"])


def _offload(figures: Mapping[str, Any]) -> Iterator[str]:
    if "offload" not in figures:
        return
    yield from ("| split | tokens/s | 4 together | MiB | tokens |", "|---|---|---|---|---|")
    for name, row in figures["offload"].items():
        if "error" in row:
            yield f"| {name} | {row['error']} | | | |"
            continue
        rates = row["tokens_per_second"], row["tokens_per_second_together"]
        memory, said = row["bytes_in_use"] / (1 << 20), "equal" if row["equal"] else "OTHER"
        yield f"| {name} | {rates[0]:.1f} | {rates[1]:.1f} | {memory:,.0f} | {said} |"
    yield ""


def _tests(part: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {word}" for word, count in part["tests"].items())

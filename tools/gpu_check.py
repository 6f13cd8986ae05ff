"""GPU acceptance check of ten minutes: `make gpu`, or `python -m tools.gpu_check`.

Parts in order of importance, each a process with a time limit: whole programs, models of 34 and 40
billion weights in the memory of a 24 GB card, offload to the host, kernel tests, logits of golden
checkpoints. Results are written after each part, so that an aborted run keeps those it has;
`--tables` prints those of a file as docs/benchmarks.md shows them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jinfer.cli.run_command import check_writable, command, write_json
from jinfer.cli.terminal.argument_parser import argument

SMALL_CARD = 24 * 1024  # MiB
_TESTS = "tests/kernels_pallas/test_gpu.py"
_COUNTS = re.compile(r"(\d+) (passed|failed|error|errors|skipped)")


@dataclass(frozen=True)
class CheckPart:
    """A process of the check and its limits.

    Attributes:
        command: after `python -m`; "{json}" is replaced by its output file, "{folder}" for a folder
            shared by all parts.
        seconds: time limit.
        memory: MiB of device memory that XLA may use; 0: all.
        environment: additional variables.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    memory: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_PROGRAMS = "tools.bench_programs --json {json}"
_MADE_UP = "{folder}/made_up.gguf"
_PYTEST = "pytest -q -n auto -p no:cacheprovider -p no:benchmark --no-header -rf"
_SEVERAL = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # processes share the device
PARTS = (
    CheckPart(
        "programs",
        _words(
            f"{_PROGRAMS} --formats q4 --tasks decode-1 decode-8 decode-16 sampled-1 prompt-512"
        ),
        150,
    ),
    CheckPart(
        "yi_34b",
        _words(f"{_PROGRAMS} --shape yi_34b --slots 1 --formats q3.5 --tasks decode-1 prompt-512"),
        100,
        SMALL_CARD,
    ),
    CheckPart(
        "falcon_40b",
        _words(
            f"{_PROGRAMS} --shape falcon_40b --slots 1 --formats q3.5_b64 "
            "--tasks decode-1 prompt-512"
        ),
        100,
        SMALL_CARD,
    ),
    CheckPart(
        "made_up",
        _words(
            f"tools.bench_models {_MADE_UP} --shape 1.1b --type Q4_0 "
            "--tokenizer tests/goldens/vocab/ggml-vocab-gpt-2.gguf"
        ),
        60,
    ),
    CheckPart("offload", _words(f"tools.bench_offload {_MADE_UP} --json {{json}}"), 240),
    CheckPart("kernel_tests", _words(f"{_PYTEST} -m gpu {_TESTS}"), 300, environment=_SEVERAL),
    CheckPart("goldens", _words(f"{_PYTEST} tests/test_goldens.py"), 300, environment=_SEVERAL),
)


def run_part(part: CheckPart, folder: Path, total: int, seconds: float) -> dict[str, Any]:
    """Run a part and returns its results, or its last lines of output."""
    figures = folder / f"{part.name}.json"
    command = [word.format(json=figures, folder=folder) for word in part.command]
    environment = {**os.environ, **part.environment}
    if part.memory and total:
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{part.memory / total:.4f}"
    begun = time.perf_counter()
    output = folder / f"{part.name}.txt"
    with output.open("w", encoding="utf-8") as file:
        try:
            status: int | None = subprocess.run(
                [sys.executable, "-m", *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    found: dict[str, Any] = {"status": status, "seconds": round(time.perf_counter() - begun, 1)}
    if counts := {word: int(n) for n, word in _COUNTS.findall(lines[-1] if lines else "")}:
        found["tests"] = counts
    if failed := [line for line in lines if line.startswith(("FAILED", "ERROR"))]:
        found["failed"] = failed
    if figures.is_file():
        found["figures"] = json.loads(figures.read_text(encoding="utf-8"))
    if status != 0:
        found["output"] = lines[-30:]
    return found


def device() -> tuple[str, int]:
    """Name of the first GPU, and MiB of its memory, from its driver and not from JAX."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        verdict = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise OSError(f"nvidia-smi: {error.stderr.strip() or error}") from None
    name, memory = verdict.splitlines()[0].rsplit(",", 1)
    return name.strip(), int(memory)


def check(out: Path, seconds: float, parts: Sequence[CheckPart] = PARTS) -> dict[str, Any]:
    """Run the parts that there is time for, and write their results after each."""
    begun = time.monotonic()
    name, total = device()
    found: dict[str, Any] = {"device": name, "memory_mib": total, "parts": {}}
    with TemporaryDirectory() as folder:
        for part in parts:
            left = seconds - (time.monotonic() - begun)
            if left < 20:
                break
            print(f"{part.name}: at most {min(left, part.seconds):.0f} s", flush=True)
            row = run_part(part, Path(folder), total, min(left, part.seconds))
            print(f"{part.name}: {row['status']} after {row['seconds']} s", flush=True)
            for line in row.get("output", ()):
                print(f"  {line}", flush=True)
            found["parts"][part.name] = row
            write_json(out, found)
    return found


@command(
    "Checks and measures jinfer on a GPU.",
    argument("out", type=Path, help="a JSON file with all figures"),
    argument("--seconds", type=float, default=600, help="time limit of all parts together (600)"),
    argument("--tables", action="store_true", help="print the tables of an existing file"),
    argument("--parts", nargs="+", choices=[part.name for part in PARTS]),
)
def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if options.tables:
        print(tables(json.loads(options.out.read_text(encoding="utf-8"))))
        return 0
    check_writable(options.out)
    chosen = [part for part in PARTS if options.parts is None or part.name in options.parts]
    found = check(options.out, options.seconds, chosen)
    return 0 if all(row["status"] == 0 for row in found["parts"].values()) else 1


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
        memory, verdict = row["bytes_in_use"] / (1 << 20), "equal" if row["equal"] else "OTHER"
        yield f"| {name} | {rates[0]:.1f} | {rates[1]:.1f} | {memory:,.0f} | {verdict} |"
    yield ""


def _tests(part: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {word}" for word, count in part["tests"].items())


if __name__ == "__main__":
    sys.exit(main())

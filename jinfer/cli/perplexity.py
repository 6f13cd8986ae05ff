"""Perplexity of a text: `jinfer perplexity SOURCE --text FILE [--json FILE]`."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jinfer.api.llm import LLM
from jinfer.cli.run_command import JSON, SET, SOURCE, command, write_json
from jinfer.cli.terminal.argument_parser import argument
from jinfer.modelspec.spec_files import parse_override
from jinfer.progress import task

Definition = Literal["halves", "whole"]


@dataclass(frozen=True)
class Window:
    """Tokens that are computed together; those from `first` are scored."""

    ids: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a text.

    Attributes:
        value: exp of the mean negative log-likelihood of a token.
        error: one standard error of `value`.
        tokens: number of scored tokens.
        windows: number of windows.
    """

    value: float
    error: float
    tokens: int
    windows: int


def windows(
    ids: Sequence[int], length: int, stride: int, definition: Definition, bos: int | None
) -> Iterator[Window]:
    """Splits a text into windows.

    Args:
        ids: of the whole text.
        definition: "halves" is llama.cpp's: windows do not overlap, each begins with BOS in place
            of its first token if the model has one, only its second half is scored, and an
            incomplete last window is dropped. "whole" is Inferflow's: a window every `stride`
            tokens, in which all tokens but the first are scored, however short the last one is.
        bos: the BOS token, if any; under "whole" the caller has prepended it.
    """
    if definition == "whole":
        for begin in range(0, len(ids), stride):
            part = tuple(ids[begin : begin + length])
            if len(part) > 1:
                yield Window(part, 1)
        return
    for begin in range(0, len(ids) - length + 1, stride):
        head = ids[begin] if bos is None else bos
        yield Window((head, *ids[begin + 1 : begin + length]), length // 2 + 1)


def perplexity(llm: LLM, parts: Sequence[Window], *, progress: bool = False) -> Perplexity:
    """The perplexity of the scored tokens."""
    losses: list[np.ndarray] = []
    with task("perplexity", len(parts), unit="window", shown=progress) as bar:
        for part in parts:
            losses.append(-llm.score([part.ids])[0][part.first - 1 :])
            bar.say(f"perplexity {math.exp(np.concatenate(losses).mean()):.3f}")
            bar.update()
    return summary(np.concatenate(losses), len(losses))


def summary(losses: np.ndarray, count: int) -> Perplexity:
    """The perplexity from the negative log-likelihood of each token."""
    losses = losses.astype(np.float64)
    value = math.exp(losses.mean())
    deviation = losses.std() / math.sqrt(max(1, len(losses) - 1))
    return Perplexity(value, value * deviation, len(losses), count)


def text_windows(
    llm: LLM, text: str, length: int, stride: int | None, definition: Definition
) -> list[Window]:
    """The windows of a text, tokenized as a whole."""
    ids = llm.encode(text)
    tokenizer = llm.tokenizer
    begins = llm.encode("")
    bos = begins[0] if tokenizer is not None and begins else None
    return list(windows(ids, length, stride or length, definition, bos))


TEXT = (  # names a text and says how it is cut
    argument("--text", required=True, metavar="FILE", help="the text, UTF-8"),
    argument("--length", type=int, default=512, help="tokens of a window (512)"),
    argument("--windows", type=int, help="stop after so many windows"),
)


@command(
    "Measures the perplexity of a text.",
    SOURCE,
    *TEXT,
    argument("--stride", type=int, help="tokens between the starts of windows (the length)"),
    argument(
        "--definition",
        choices=("halves", "whole"),
        default="halves",
        help="halves: as in llama.cpp; whole: as in Inferflow",
    ),
    SET,
    JSON,
)
def main(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if options.length < 4 or (options.stride is not None and options.stride < 1):
        print("error: --length must be at least 4 and --stride at least 1", file=sys.stderr)
        return 2
    overrides: dict[str, Any] = {"engine.context": options.length}
    for override in options.set:
        overrides |= parse_flat(override)
    text = Path(options.text).read_text(encoding="utf-8-sig")
    llm = LLM(options.source, progress=sys.stderr.isatty(), **overrides)
    parts = text_windows(llm, text, options.length, options.stride, options.definition)
    parts = parts[: options.windows]
    if not parts:
        least = f"a window has {options.length} tokens"
        print(f"error: {options.text}: is too short: {least}; use --length", file=sys.stderr)
        return 2
    begun = time.perf_counter()
    result = perplexity(llm, parts, progress=sys.stderr.isatty())
    seconds = time.perf_counter() - begun
    print(f"perplexity {result.value:.4f} ± {result.error:.4f} over {result.tokens} tokens")
    print(f"{result.windows} windows of {options.length}, {options.definition}, {seconds:.1f} s")
    report = {"source": options.source, "text": options.text, "length": options.length,
              "definition": options.definition, "set": options.set, "seconds": seconds,
              **asdict(result)}  # fmt: skip
    write_json(options.json, report)
    return 0


def parse_flat(text: str) -> dict[str, Any]:
    """`{"a.b": value}` of "a.b=value", as for `--set`. Raises `SpecError`."""
    table: Any = parse_override(text)
    keys = []
    while isinstance(table, dict) and len(table) == 1:
        (key, table), *_ = table.items()
        keys.append(key)
    return {".".join(keys): table}

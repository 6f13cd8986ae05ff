"""Continuous batching benchmark: `jinfer bench engine SOURCE [--svg FILE]`.

Four measurements, all on one engine in one run, so that they can be compared:

- a prompt that arrives while four streams decode: the longest gap between two tokens of a stream
  compared with the usual gap, and the new prompt's time to first token (TTFT);
- a prefix of 1,000 tokens shared by 16 requests (prefix cache): how often it is computed, and the
  TTFT of the first request and of the others;
- streams of mixed lengths that arrive over time: total tokens per second, compared with one stream
  alone;
- answers under a JSON schema compared with free answers of the same lengths, in turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from jinfer.api.llm import LLM
from jinfer.cli.bench.bench_figures import check_plot, plot, spread, spread_text, table
from jinfer.cli.run_command import JSON, SOURCE, SVG, command, write_json
from jinfer.cli.terminal.argument_parser import argument
from jinfer.engine.output.completion import Chunk, Usage
from jinfer.sampling.sampling_params import SamplingParams

_LONG, _COMMON = 1500, 1000  # tokens
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 4},
        "summary": {"type": "string", "minLength": 100, "maxLength": 200},
    },
    "required": ["name", "age", "email", "tags", "summary"],
    "additionalProperties": False,
}


@dataclass
class BenchStream:
    """A request and the arrival times of its tokens, in seconds from its start."""

    prompt: list[int]
    tokens: int
    begun: float = 0.0
    times: list[float] = field(default_factory=list)
    usage: Usage | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def start(self, llm: LLM) -> BenchStream:
        """Submits it: greedy, ignoring end-of-text."""
        params = SamplingParams(max_tokens=self.tokens, ignore_eos=True)
        (prepared,) = llm.session.prepare(self.prompt, params)
        self.begun = time.perf_counter()
        llm.session.submit(prepared, self._take)
        return self

    def _take(self, piece: Any) -> None:
        if isinstance(piece, Chunk):
            self.times += [time.perf_counter() - self.begun] * len(piece.token_ids)
            return
        self.usage = piece if isinstance(piece, Usage) else None
        self.done.set()


@dataclass(frozen=True)
class StreamGaps:
    """A long prompt during streams, in seconds.

    Attributes:
        usual, longest: gap between two arrivals at a stream, alone and during the prompt; tokens of
            one call arrive together.
        first: time to first token of the prompt, during the streams; and alone.
    """

    usual: float
    longest: float
    first: float
    first_alone: float


@dataclass(frozen=True)
class SharedPrefix:
    """A prefix shared by several requests.

    Attributes:
        computed: prompt tokens computed.
        prompt_tokens: prompt tokens requested.
        first, others: time to first token, of the first request and (median) of the others.
        own: the same for a prompt with only the unshared part of the others.
    """

    computed: int
    prompt_tokens: int
    first: float
    others: float
    own: float


@dataclass(frozen=True)
class MixedStreams:
    """Tokens per second of many streams together, and of one alone."""

    streams: int
    together: float
    alone: float


def _prompt(rng: random.Random, vocab: int, length: int) -> list[int]:
    return [rng.randrange(3, vocab) for _ in range(length)]


def _wait(streams: Sequence[BenchStream]) -> None:
    for stream in streams:
        stream.done.wait()


def gaps(llm: LLM, rng: random.Random, tokens: int) -> tuple[StreamGaps, list[BenchStream]]:
    """A prompt of 1,500 tokens arrives while four streams decode."""
    vocab = llm.spec.dims["vocab"]
    alone = BenchStream(_prompt(rng, vocab, _LONG), 2).start(llm)
    _wait([alone])
    streams = [BenchStream(_prompt(rng, vocab, 16), tokens).start(llm) for _ in range(4)]
    while min(len(stream.times) for stream in streams) < tokens // 3:
        time.sleep(0.005)
    arrived = time.perf_counter()
    long = BenchStream(_prompt(rng, vocab, _LONG), 2).start(llm)
    _wait([*streams, long])
    before: list[float] = []
    during: list[float] = []
    for stream in streams:
        for a, b in pairwise(sorted({stream.begun + at for at in stream.times})):
            if b < arrived:
                before.append(b - a)
            elif a < arrived + long.times[0]:
                during.append(b - a)
    # A tiny model's streams may have ended before the prompt was looked at.
    usual = statistics.median(before or during or [long.times[0]])
    return StreamGaps(usual, max(during, default=usual), long.times[0], alone.times[0]), [
        *streams,
        long,
    ]


def shared(llm: LLM, rng: random.Random) -> SharedPrefix:
    """16 requests with the same first 1,000 tokens arrive at once."""
    vocab = llm.spec.dims["vocab"]
    begin = _prompt(rng, vocab, _COMMON)
    streams = [BenchStream([*begin, *_prompt(rng, vocab, 20)], 4) for _ in range(16)]
    before = llm.stats()
    for stream in streams:
        stream.start(llm)
    _wait(streams)
    after = llm.stats()
    prompt_tokens = after.prompt_tokens - before.prompt_tokens
    computed = prompt_tokens - (after.cached_tokens - before.cached_tokens)
    late = BenchStream([*begin, *_prompt(rng, vocab, 20)], 4).start(llm)
    _wait([late])
    own = BenchStream(_prompt(rng, vocab, 20), 4).start(llm)
    _wait([own])
    return SharedPrefix(computed, prompt_tokens, streams[0].times[0], late.times[0], own.times[0])


def mixed(llm: LLM, rng: random.Random, tokens: int) -> MixedStreams:
    """Streams of mixed lengths that arrive over time."""
    vocab = llm.spec.dims["vocab"]
    single = BenchStream(_prompt(rng, vocab, 16), tokens).start(llm)
    _wait([single])
    alone = (tokens - 1) / (single.times[-1] - single.times[0])
    begun = time.perf_counter()
    streams = []
    for _ in range(24):
        length, new = rng.choice([8, 40, 200]), rng.choice([tokens // 4, tokens // 2, tokens])
        streams.append(BenchStream(_prompt(rng, vocab, length), new).start(llm))
        time.sleep(rng.expovariate(1 / (tokens / alone / 16)))
    _wait(streams)
    together = sum(stream.tokens for stream in streams) / (time.perf_counter() - begun)
    return MixedStreams(len(streams), together, alone)


def schema(llm: LLM, count: int, rounds: int) -> tuple[float, list[float]]:
    """Tokens per second under a schema, and of free answers of equal length, for each round."""
    prompts = [f"Person {i} as JSON: " for i in range(count)]
    kept = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=300, json_schema=_SCHEMA)
        for i in range(count)
    ]
    lengths = [len(answer.token_ids) for answer in llm.generate(prompts, kept)]
    free = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=length, ignore_eos=True)
        for i, length in enumerate(lengths)
    ]

    def seconds(params: list[SamplingParams]) -> float:
        begun = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - begun

    seconds(free)
    both = [(seconds(free), seconds(kept)) for _ in range(rounds)]
    rate = sum(lengths) / statistics.median(under for _, under in both)
    return rate, [without / under for without, under in both]


def drawing(streams: Sequence[BenchStream], path: str) -> None:
    """Arrival times of the tokens of each stream, as an SVG or PNG."""
    start = min(stream.begun for stream in streams)
    names = [f"stream {i + 1}" for i in range(len(streams) - 1)]
    with plot(path, figsize=(8, 2.6)) as axes:
        for row, stream in enumerate(streams):
            at = [1e3 * (stream.begun - start + t) for t in stream.times]
            axes.plot(at, [row] * len(at), "|", markersize=12)
            axes.plot(1e3 * (stream.begun - start), row, "k>", markersize=4)
        axes.set_yticks(range(len(streams)), [*names, f"prompt of {_LONG}"])
        axes.set_xlabel("milliseconds; a stroke is a token, a triangle an arrival")
        axes.invert_yaxis()


@command(
    "Measures latency interference between concurrent streams: time between "
    "tokens, time to the first token, rates.",
    SOURCE,
    argument("--rounds", type=int, default=3, help="measurements of gaps (3)"),
    argument("--tokens", type=int, default=120, help="tokens per stream (120)"),
    argument("--seed", type=int, default=0, help="seed of the prompts (0)"),
    SVG,
    JSON,
)
def main(options: argparse.Namespace) -> int:
    """Print the measurements."""
    check_plot(options.svg)
    rng = random.Random(options.seed)
    keys: dict[str, Any] = {
        "engine.slots": 16,
        "engine.context": _LONG + 600,
        "engine.warm_up": True,
    }
    with LLM(options.source, progress=True, **keys) as llm:
        made = llm.compilations
        print(f"{made} programs made at start")
        gaps(llm, rng, options.tokens)  # once, so that nothing is new to the machine
        rounds = [gaps(llm, rng, options.tokens) for _ in range(options.rounds)]
        found = [result for result, _ in rounds]
        rows = [
            (word, f"{1e3 * statistics.median(getattr(gap, name) for gap in found):.0f}")
            for name, word in (
                ("usual", "usual gap between two arrivals at a stream"),
                ("longest", "longest gap while the prompt is computed"),
                ("first", "first token of the prompt, during the streams"),
                ("first_alone", "first token of the prompt, alone"),
            )
        ]
        print(table(["a prompt of 1,500 tokens during 4 streams", "milliseconds"], rows))
        sharing, mixture = shared(llm, rng), mixed(llm, rng, options.tokens)
        print(
            f"\n16 requests with the same first {_COMMON} tokens: {sharing.computed:,} of "
            f"{sharing.prompt_tokens:,} tokens computed; first token of the first "
            f"{1e3 * sharing.first:.0f} ms, of a later one {1e3 * sharing.others:.0f} ms, of a "
            f"prompt without the beginning {1e3 * sharing.own:.0f} ms"
        )
        print(
            f"{mixture.streams} streams over time: {mixture.together:.0f} tokens/s, one alone "
            f"{mixture.alone:.0f} ({mixture.together / mixture.alone:.2f})"
        )
        if llm.tokenizer is not None:
            for count in (1, 4, 8, 16):
                rate, ratios = schema(llm, count, options.rounds)
                print(
                    f"{count} answers under a schema: {rate:.0f} tokens/s, over free ones as long "
                    f"{spread_text(spread(ratios))}"
                )
        print(f"programs made after start: {llm.compilations - made}")
    if options.svg:
        drawing(rounds[-1][1], options.svg)
    record = {
        "gaps": list(map(asdict, found)),
        "shared": asdict(sharing),
        "mixed": asdict(mixture),
    }
    write_json(options.json, record)
    return 0

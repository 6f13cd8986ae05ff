"""Server load test: `jinfer bench serve URL [--rate 1,2,4 | --clients 1,8]`.

For any server with OpenAI's `/v1/chat/completions` or `/v1/completions` (jinfer, llama-server,
vLLM). Open loop (`--rate`): Poisson arrivals at a given rate, whether or not the server keeps up;
closed loop (`--clients`): a fixed number of users, each of whom sends the next request when
answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from jinfer.cli.bench.bench_figures import check_plot, plot, table
from jinfer.cli.run_command import JSON, SVG, command, write_json
from jinfer.cli.terminal.argument_parser import argument, one_of
from jinfer.loader.sources import SourceError

if TYPE_CHECKING:
    import httpx

PERCENTILES = (50, 90, 95, 99)
_HEADS = (
    "load", "answers", "failed", "requests/s", "good/s", "tokens/s", "prompt tokens/s", "cached",
    "first token p50 / p95 / p99 ms", "between tokens p50 / p95 / p99 ms",
)  # fmt: skip
_WORDS = (
    "river", "stone", "paper", "window", "garden", "summer", "bridge", "letter", "market", "doctor",
    "silver", "engine", "yellow", "forest", "island", "museum", "pencil", "rocket", "tunnel",
)  # fmt: skip


@dataclass(frozen=True)
class LengthMix:
    """A distribution of lengths.

    Attributes:
        lengths: words of a prompt, or tokens of an answer.
        weights: of each.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> LengthMix:
        """`128`, or `32:3,512:1`: 32 three times as often as 512. Raises `ValueError`."""
        lengths, weights = [], []
        for part in text.split(","):
            length, _, weight = part.partition(":")
            lengths.append(int(length))
            weights.append(float(weight or 1))
        if min(lengths) < 1 or not all(0 < weight < 1e9 for weight in weights):
            raise ValueError("lengths are at least 1, weights above 0")
        return cls(tuple(lengths), tuple(weights))

    def draw(self, rng: random.Random) -> int:
        """A random length."""
        return rng.choices(self.lengths, self.weights)[0]


@dataclass(frozen=True)
class Workload:
    """The requests of users.

    Attributes:
        prompt: words of a question.
        answer: max tokens of an answer.
        shared: words of the prefix shared by all conversations.
        turns: questions per conversation, each with the history before it.
        seed: of the random generator.
    """

    prompt: LengthMix
    answer: LengthMix
    shared: int = 0
    turns: int = 1
    seed: int | str = 0


@dataclass(frozen=True)
class ChatTurn:
    """A question, and the max length of its answer."""

    question: str
    tokens: int


def conversation(work: Workload, number: int) -> list[ChatTurn]:
    """The turns of one user; the same for each run with the same seed."""
    rng = random.Random(f"{work.seed}/{number}")
    begin = words(random.Random(f"{work.seed}/shared"), work.shared)
    turns = []
    for turn in range(work.turns):
        own = words(rng, work.prompt.draw(rng))
        before = f"{begin}\n\n" if begin and turn == 0 else ""
        turns.append(ChatTurn(before + own, work.answer.draw(rng)))
    return turns


def words(rng: random.Random, count: int) -> str:
    """A text of so many words; a common word is about a token."""
    return " ".join(rng.choices(_WORDS, k=count))


def arrivals(rate: float, count: int, seed: int | str) -> Sequence[float]:
    """Arrival times of a Poisson process of this rate, in seconds."""
    rng, now, times = random.Random(f"{seed}/arrivals"), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


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
    done = [answer for answer in answers if answer.error is None and answer.times]
    errors: dict[str, int] = {}
    for answer in answers:
        if answer.error is not None or not answer.times:
            why = answer.error or "an empty answer"
            errors[why] = errors.get(why, 0) + 1
    begun = min((answer.begun for answer in answers), default=0.0)
    seconds = max((item.times[-1] for item in done), default=begun) - begun or math.inf
    prompts = sum(item.prompt for item in done)
    return LoadResult(
        load,
        offered,
        len(done),
        len(answers) - len(done),
        seconds if math.isfinite(seconds) else 0.0,
        len(done) / seconds,
        sum(item.tokens for item in done) / seconds,
        prompts / seconds,
        sum(map(limits.kept, done)) / seconds,
        sum(item.cached for item in done) / prompts if prompts else 0.0,
        percentiles([item.first for item in done]),
        percentiles([item.between for item in done if item.tokens > 1]),
        percentiles([b - a for item in done for a, b in pairwise(item.times)]),
        percentiles([item.times[-1] - item.begun for item in done]),
        errors,
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The value that so many percent do not exceed: one of the values; 0 if there are none."""
    ordered = sorted(values)
    return {
        f"p{share}": ordered[max(math.ceil(share / 100 * len(ordered)) - 1, 0)] if ordered else 0.0
        for share in PERCENTILES
    }


_CONNECT = 10.0  # seconds


@dataclass(frozen=True)
class Target:
    """The server under test.

    Attributes:
        client: connected to the server.
        model: model name.
        chat: chat completions, otherwise text completions.
        extra: additional request fields.
        begun: start of the load, by `time.perf_counter`.
    """

    client: httpx.AsyncClient
    model: str
    chat: bool
    extra: Mapping[str, Any]
    begun: float

    def now(self) -> float:
        """Seconds since the start of the load."""
        return time.perf_counter() - self.begun

    async def ask(
        self, messages: Sequence[Mapping[str, str]], tokens: int
    ) -> tuple[AnswerTimes, str]:
        """An answer's times, and its text."""
        import httpx

        body: dict[str, Any] = {"model": self.model, "max_tokens": tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **self.extra}
        if self.chat:
            path, body["messages"] = "/v1/chat/completions", list(messages)
        else:
            path, body["prompt"] = (
                "/v1/completions",
                "\n\n".join(message["content"] for message in messages),
            )
        answer, texts = AnswerTimes(self.now()), list[str]()
        try:
            async with self.client.stream("POST", path, json=body) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    answer.error = f"{reply.status_code}: {_reason(reply)}"
                    return answer, ""
                async for line in reply.aiter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        self._take(answer, texts, json.loads(data))
        except httpx.TimeoutException:
            answer.error = "no answer in time"
        except (httpx.HTTPError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"[:200]
        answer.tokens = answer.tokens or len(answer.times)
        return answer, "".join(texts)

    def _take(self, answer: AnswerTimes, texts: list[str], event: Mapping[str, Any]) -> None:
        if "error" in event:
            error = event["error"]
            answer.error = str(error.get("message") if isinstance(error, dict) else error)[:200]
        usage = event.get("usage") or {}
        answer.tokens = usage.get("completion_tokens") or answer.tokens
        answer.prompt = usage.get("prompt_tokens") or answer.prompt
        details = usage.get("prompt_tokens_details") or {}
        answer.cached = details.get("cached_tokens") or answer.cached
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            names = ("content", "reasoning_content", "reasoning")
            pieces = [choice.get("text"), *(delta.get(name) for name in names)]
            text = "".join(piece for piece in pieces if piece)
            if text:
                answer.times.append(self.now())
                texts.append(text)


def _reason(reply: httpx.Response) -> str:
    """The error message of a server's response."""
    try:
        error = reply.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:200]
    except (ValueError, KeyError, TypeError):
        return reply.text[:200]


async def talk(
    target: Target, work: Workload, number: int, take: Callable[[AnswerTimes], None]
) -> None:
    """One user's conversation; it ends where an answer fails."""
    messages: list[dict[str, str]] = []
    for turn in conversation(work, number):
        messages.append({"role": "user", "content": turn.question})
        answer, text = await target.ask(messages, turn.tokens)
        take(answer)
        if answer.error is not None:
            return
        messages.append({"role": "assistant", "content": text})


async def open_loop(target: Target, work: Workload, rate: float, users: int) -> list[AnswerTimes]:
    """Users come by chance, and do not wait for one another."""
    answers: list[AnswerTimes] = []

    async def come(number: int, at: float) -> None:
        await asyncio.sleep(at - target.now())
        await talk(target, work, number, answers.append)

    times = arrivals(rate, users, work.seed)
    await asyncio.gather(*(come(number, at) for number, at in enumerate(times)))
    return answers


async def closed_loop(
    target: Target, work: Workload, clients: int, users: int
) -> list[AnswerTimes]:
    """So many at a time; the next comes when one has gone."""
    answers: list[AnswerTimes] = []
    waiting = iter(range(users))

    async def serve() -> None:
        for number in waiting:
            await talk(target, work, number, answers.append)

    await asyncio.gather(*(serve() for _ in range(clients)))
    return answers


async def measure(options: argparse.Namespace) -> list[LoadResult]:
    """The figures of each load, one after another. Raises `SourceError`."""
    import httpx

    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    work = Workload(options.prompt, options.answer, options.shared, options.turns, options.seed)
    limits = LatencyLimits(
        *(item and item / 1e3 for item in (options.first_limit, options.between_limit))
    )
    url = options.url.rstrip("/").removesuffix("/v1")
    rows = []
    async with httpx.AsyncClient(
        base_url=url if "://" in url else f"http://{url}",
        headers=headers,
        timeout=httpx.Timeout(options.timeout, connect=_CONNECT),
        limits=httpx.Limits(max_connections=None),
    ) as client:
        model = options.model or await first_model(client, options.url)
        loads = options.rate or options.clients
        for number, load in enumerate([loads[0], *loads]):
            # The first, small and thrown away, is for what a server does but once.
            users = options.users if number else min(options.warm_up, options.users)
            if not users:
                continue
            # Each load has its own users: no prompt may hit the prefix cache of another load.
            own = replace(work, seed=f"{work.seed}/{number}")
            target = Target(client, model, not options.text, options.extra, time.perf_counter())
            if options.rate:
                answers = await open_loop(target, own, load, users)
            else:
                answers = await closed_loop(target, own, int(load), users)
            name = f"{load:g}/s" if options.rate else f"{load:g} clients"
            if number:
                rows.append(figures(name, load, answers, limits))
    return rows


async def first_model(client: httpx.AsyncClient, url: str) -> str:
    """The model that a server lists first. Raises `SourceError`."""
    import httpx

    try:
        reply = await client.get("/v1/models")
        if reply.status_code != 200:
            raise SourceError(f"{url}: {reply.status_code}: {_reason(reply)}")
        return str(reply.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SourceError(f"{url}: cannot be reached: {error}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise SourceError(f"{url}: lists no model; give --model NAME") from None


def cells(row: LoadResult) -> list[str]:
    """The cells of a row of the table."""
    texts = [row.load, f"{row.answers}", f"{row.failed}", f"{row.requests:.2f}"]
    texts += [f"{row.good:.2f}", f"{row.tokens:.1f}", f"{row.prompts:.0f}", f"{row.cached:.0%}"]
    return texts + [
        " / ".join(f"{1e3 * found[name]:.1f}" for name in ("p50", "p95", "p99"))
        for found in (row.first, row.between)
    ]


def drawing(rows: Sequence[LoadResult], path: str, unit: str) -> None:
    """Throughput and latency over load, as an SVG or PNG."""
    offered = [row.offered for row in rows]
    with plot(path, 1, 2, figsize=(9, 3.2)) as (rates, waiting):
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


def _numbers(text: str) -> list[float]:
    found = [float(part) for part in text.split(",")]
    if not all(0 < item < 1e6 for item in found):
        raise argparse.ArgumentTypeError("rates are above 0")
    return found


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def _object(text: str) -> dict[str, Any]:
    if not isinstance(found := json.loads(text), dict):
        raise argparse.ArgumentTypeError("write a JSON object")
    return found


def _mix(flag: str, help: str) -> Callable[[Any], Any]:
    return argument(flag, type=LengthMix.parse, default="64", metavar="MIX", help=help)


def _number(
    flag: str, kind: type, metavar: str, default: float | None, help: str
) -> Callable[[Any], Any]:
    return argument(flag, type=kind, metavar=metavar, default=default, help=help)


@command(
    "Load tests an OpenAI-compatible HTTP server: "
    "first tokens, time between tokens, rates, answers within limits.",
    argument("url", help="address of the server, such as http://127.0.0.1:8080"),
    one_of(
        argument("--rate", type=_numbers, metavar="R,R", help="arrivals per second (open loop)"),
        argument(
            "--clients",
            type=_counts,
            metavar="N,N",
            default=[1, 4, 8, 16],
            help="concurrent users (closed loop; 1,4,8,16)",
        ),
    ),
    argument("--users", type=_count, default=32, help="users per load (32)"),
    argument("--turns", type=_count, default=1, help="questions per user (1)"),
    _mix("--prompt", help="words of a prompt: 64, or a mix such as 32:3,512:1"),
    _mix("--answer", help="max tokens of an answer (64)"),
    _number("--shared", int, "N", 0, "words of a prefix that all prompts share (0)"),
    argument("--text", action="store_true", help="use /v1/completions, without a chat template"),
    argument("--model", help="one of the server's models (the first that it lists)"),
    argument("--api-key", metavar="KEY", help="the API key"),
    argument(
        "--extra",
        type=_object,
        default={},
        metavar="JSON",
        help='more fields of requests, such as {"ignore_eos": true}',
    ),
    _number("--first-limit", float, "MS", None, "limit of the time to the first token"),
    _number("--between-limit", float, "MS", None, "limit of the time between tokens"),
    _number("--timeout", float, "S", 300.0, "fail after so many seconds without data (300)"),
    _number("--warm-up", int, "N", 2, "users of the warm-up (2)"),
    _number("--seed", int, "N", 0, "random seed (0)"),
    JSON,
    SVG,
)
def main(options: argparse.Namespace) -> int:
    """Print the results, and write the requested files; 1 if nothing was answered."""
    if find_spec("httpx") is None:
        needed = f"run: {sys.executable} -m pip install 'jinfer[bench]'"
        raise SourceError(f"this needs the package httpx; {needed}")
    check_plot(options.svg)
    rows = asyncio.run(measure(options))
    print(table(_HEADS, map(cells, rows)))
    for row in rows:
        for why, count in row.errors.items():
            print(f"{row.load}: {count} failed: {why}", file=sys.stderr)
    names = ("url", "model", "text", "users", "shared", "turns", "seed")
    about = {name: getattr(options, name) for name in names}
    about |= {"prompt": asdict(options.prompt), "answer": asdict(options.answer)}
    about |= {"first_limit_ms": options.first_limit, "between_limit_ms": options.between_limit}
    write_json(options.json, {**about, "loads": [asdict(row) for row in rows]})
    if options.svg:
        drawing(rows, options.svg, "users a second" if options.rate else "clients")
    return 0 if any(row.answers for row in rows) else 1

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
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinfer.cli.bench.bench_serve_stats import (
    AnswerTimes,
    LatencyLimits,
    LoadResult,
    drawing,
    figures,
    record,
    table,
)
from jinfer.cli.prog_name import prog_of_module
from jinfer.cli.run_command import check_outputs
from jinfer.cli.terminal.argument_parser import CliParser
from jinfer.loader.sources import SourceError
from jinfer.progress import throughout

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


if TYPE_CHECKING:
    import httpx

_CONNECT = 10.0  # seconds


class BenchError(ValueError):
    """A measurement that cannot be made; one line."""


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
                "\n\n".join(each["content"] for each in messages),
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
    """The figures of each load, one after another. Raises `BenchError`."""
    import httpx

    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    work = Workload(options.prompt, options.answer, options.shared, options.turns, options.seed)
    limits = LatencyLimits(
        *(each and each / 1e3 for each in (options.first_limit, options.between_limit))
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
    """The model that a server lists first. Raises `BenchError`."""
    import httpx

    try:
        reply = await client.get("/v1/models")
        if reply.status_code != 200:
            raise BenchError(f"{url}: {reply.status_code}: {_reason(reply)}")
        return str(reply.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BenchError(f"{url}: cannot be reached: {error}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise BenchError(f"{url}: lists no model; give --model NAME") from None


def report(options: argparse.Namespace, rows: Sequence[LoadResult]) -> int:
    """Print the results, and write the requested files; 1 if nothing was answered."""
    print(table(rows))
    for row in rows:
        for why, count in row.errors.items():
            print(f"{row.load}: {count} failed: {why}", file=sys.stderr)
    if options.json:
        names = ("url", "model", "text", "users", "shared", "turns", "seed")
        about = {name: getattr(options, name) for name in names}
        about |= {"prompt": asdict(options.prompt), "answer": asdict(options.answer)}
        about |= {"first_limit_ms": options.first_limit, "between_limit_ms": options.between_limit}
        found = record(rows, about)
        Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    if options.svg:
        drawing(rows, options.svg, "users a second" if options.rate else "clients")
    return 0 if any(row.answers for row in rows) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = CliParser(
        prog=prog_of_module(__spec__.name),
        description="Load tests an OpenAI-compatible HTTP server: "
        "first tokens, time between tokens, rates, answers within limits."
    )  # fmt: skip
    add = parser.add_argument
    add("url", help="address of the server, such as http://127.0.0.1:8080")
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument(
        "--rate", type=_numbers, metavar="R,R", help="arrivals per second (open loop)"
    )
    loop.add_argument("--clients", type=_counts, metavar="N,N", default=[1, 4, 8, 16],
                      help="concurrent users (closed loop; 1,4,8,16)")  # fmt: skip
    add("--users", type=_count, default=32, help="users per load (32)")
    add("--turns", type=_count, default=1, help="questions per user (1)")
    add(
        "--prompt",
        type=LengthMix.parse,
        default="64",
        metavar="MIX",
        help="words of a prompt: 64, or a mix such as 32:3,512:1",
    )
    add(
        "--answer",
        type=LengthMix.parse,
        default="64",
        metavar="MIX",
        help="max tokens of an answer (64)",
    )
    add(
        "--shared",
        type=int,
        default=0,
        metavar="N",
        help="words of a prefix that all prompts share (0)",
    )
    add("--text", action="store_true", help="use /v1/completions, without a chat template")
    add("--model", help="one of the server's models (the first that it lists)")
    add("--api-key", metavar="KEY", help="the API key")
    add("--extra", type=_object, default={}, metavar="JSON",
        help='more fields of requests, such as {"ignore_eos": true}')  # fmt: skip
    add("--first-limit", type=float, metavar="MS", help="limit of the time to the first token")
    add("--between-limit", type=float, metavar="MS", help="limit of the time between tokens")
    add(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="fail after so many seconds without data (300)",
    )
    add("--warm-up", type=int, default=2, metavar="N", help="users of the warm-up (2)")
    add("--seed", type=int, default=0, help="random seed (0)")
    add("--json", metavar="FILE", help="write all figures as JSON")
    add("--svg", metavar="FILE", help="plot the figures")
    options = parser.parse_args(arguments)
    try:
        check_outputs(options)
        with throughout(parser.prog):
            return report(options, asyncio.run(measure(options)))
    except ModuleNotFoundError as error:
        needed = f"run: {sys.executable} -m pip install 'jinfer[bench]'"
        print(f"error: this needs the package {error.name}; {needed}", file=sys.stderr)
    except (BenchError, SourceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


def _numbers(text: str) -> list[float]:
    found = [float(part) for part in text.split(",")]
    if not all(0 < each < 1e6 for each in found):
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


if __name__ == "__main__":
    sys.exit(main())

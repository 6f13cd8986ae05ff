"""Clients that behave badly, and what a service has to be after them."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

WORDS = (
    *("the", "a", "cat", "sat", "on", "mat", "and", "then", "it", "went", "away"),
    *("to", "see", "more", "of", "what", "there", "was"),
)

OPENAI = "/v1/chat/completions"
# How the last line of a stream looks that came to its end.
ENDS: dict[str, Callable[[str], bool]] = {
    OPENAI: lambda line: line == "data: [DONE]",
    "/v1/messages": lambda line: line.startswith("data: ") and "message_stop" in line,
    "/api/chat": lambda line: orjson.loads(line).get("done") is True,
}


@dataclass
class Soak:
    """Many concurrent clients of a service.

    Attributes:
        url: where it is.
        interfaces: which of openai, anthropic and ollama they speak.
        clients: how many.
        seconds: for how long.
        codes: answers by status.
        wrong: what should not have been.
        whole: answers that came to their end.
        asked: requests by interface.
    """

    url: str
    interfaces: tuple[str, ...] = ("openai",)
    clients: int = 64
    seconds: float = 300.0
    codes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    whole: int = 0
    asked: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        """Runs it to its end."""
        end = time.monotonic() + self.seconds
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as http:
            clients = (self._client(http, random.Random(i), end) for i in range(self.clients))
            await asyncio.gather(*clients)

    async def _client(self, http: httpx.AsyncClient, rng: random.Random, end: float) -> None:
        bad = (self._leaves, self._hurries, self._writes_badly)
        acts = (self._stream, self._stream, self._stream, *bad)
        while time.monotonic() < end:
            try:
                await rng.choice(acts)(http, rng)
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")

    def _body(self, rng: random.Random) -> dict[str, Any]:
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))
        more: dict[str, Any] = rng.choice(
            [
                {},
                {"temperature": 0},
                {"n": 2, "seed": rng.randint(0, 9)},
                {"stop": ["and", "."]},
                {"logprobs": True, "top_logprobs": 2},
                {"response_format": {"type": "json_object"}},
                {"min_p": 0.1, "repetition_penalty": 1.1},
            ]
        )
        messages = [{"role": "user", "content": text}]
        return {"messages": messages, "max_tokens": rng.randint(1, 40), "stream": True, **more}

    def _asked(self, rng: random.Random, **more: Any) -> tuple[str, dict[str, Any]]:
        """A route of an interface, and a body for it."""
        body = self._body(rng) | more
        kind = rng.choice(self.interfaces)
        self.asked[kind] += 1
        if kind == "openai":
            return OPENAI, body
        plain = {"messages": body["messages"], "stream": body["stream"]}
        if kind == "anthropic":
            ends: dict[str, Any] = rng.choice(
                [{}, {"stop_sequences": ["and"]}, {"system": "Be brief."}]
            )
            return "/v1/messages", {**plain, "max_tokens": body["max_tokens"], **ends}
        options = {"num_predict": body["max_tokens"], "temperature": rng.choice([0, 0.8])}
        format = rng.choice([{}, {"format": "json"}])
        return "/api/chat", {**plain, "model": "smol", "options": options, **format}

    def _count(self, status: int) -> None:
        self.codes[str(status)] += 1
        if status >= 500:
            self.wrong.append(f"status {status}")

    async def _stream(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Reads an answer to its end, which has to be there."""
        path, body = self._asked(rng)
        async with http.stream("POST", path, json=body) as answer:
            self._count(answer.status_code)
            lines = [line async for line in answer.aiter_lines() if line]
            if answer.status_code == 200:
                self.whole += 1
                if not ENDS[path](lines[-1]):
                    self.wrong.append(f"an answer ended with {lines[-1][:200]}")

    async def _leaves(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Goes after a few pieces."""
        left = rng.randint(0, 6)
        path, body = self._asked(rng, max_tokens=400)
        async with http.stream("POST", path, json=body) as answer:
            self._count(answer.status_code)
            async for _ in answer.aiter_lines():
                left -= 1
                if left < 0:
                    return

    async def _hurries(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """A client without time that requests a whole answer."""
        path, body = self._asked(rng, stream=False)
        try:
            answer = await http.post(path, json=body, timeout=rng.uniform(0.01, 1.0))
        except httpx.TimeoutException:
            self.codes["left"] += 1
        else:
            self._count(answer.status_code)

    async def _writes_badly(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Sends a body that is broken somewhere."""
        path, body = self._asked(rng, stream=False, max_tokens=2)
        data = bytearray(orjson.dumps(body))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        answer = await http.post(path, content=bytes(data))
        self._count(answer.status_code)

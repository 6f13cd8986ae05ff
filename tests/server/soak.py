"""Clients that behave badly, and what a service has to be after them."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

WORDS = (
    *("the", "a", "cat", "sat", "on", "mat", "and", "then", "it", "went", "away"),
    *("to", "see", "more", "of", "what", "there", "was"),
)


@dataclass
class Soak:
    """Many clients at a time against one service.

    Attributes:
        url: where it is.
        clients: how many.
        seconds: for how long.
        codes: answers by status.
        wrong: what should not have been.
        whole: answers that came to their end.
    """

    url: str
    clients: int = 64
    seconds: float = 300.0
    codes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    whole: int = 0

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

    def _count(self, status: int) -> None:
        self.codes[str(status)] += 1
        if status >= 500:
            self.wrong.append(f"status {status}")

    async def _stream(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Reads an answer to its end, which has to be there."""
        async with http.stream("POST", "/v1/chat/completions", json=self._body(rng)) as answer:
            self._count(answer.status_code)
            lines = [line async for line in answer.aiter_lines() if line]
            if answer.status_code == 200:
                self.whole += 1
                if lines[-1] != "data: [DONE]":
                    self.wrong.append(f"an answer ended with {lines[-1][:200]}")

    async def _leaves(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Goes after a few pieces."""
        left = rng.randint(0, 6)
        body = self._body(rng) | {"max_tokens": 400, "ignore_eos": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            self._count(answer.status_code)
            async for _ in answer.aiter_lines():
                left -= 1
                if left < 0:
                    return

    async def _hurries(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Has no time, and asks for a whole answer."""
        body = self._body(rng) | {"stream": False}
        try:
            answer = await http.post(
                "/v1/chat/completions", json=body, timeout=rng.uniform(0.01, 1.0)
            )
        except httpx.TimeoutException:
            self.codes["left"] += 1
        else:
            self._count(answer.status_code)

    async def _writes_badly(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Sends a body that is broken somewhere."""
        data = bytearray(orjson.dumps(self._body(rng) | {"stream": False, "max_tokens": 2}))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        answer = await http.post("/v1/chat/completions", content=bytes(data))
        self._count(answer.status_code)

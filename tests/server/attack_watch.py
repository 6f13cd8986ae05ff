"""A service under attack: what streams and health checks notice of those who hold connections."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from tests.server.running import ROOT


@contextlib.asynccontextmanager
async def attacked(port: int, kind: str, count: int, addresses: int) -> AsyncGenerator[list[str]]:
    """Attackers of `tests.server.attackers` in their own process; afterwards, what they counted."""
    given = (str(port), kind, str(count), str(addresses))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.server.attackers", *given),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    counted = list[str]()
    try:
        await process.stdout.readline()
        yield counted
        counted.append((await process.communicate())[0].decode().strip())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@dataclass
class Watch:
    """Streams and health checks from an address, and what became of them.

    Attributes:
        port: of the service.
        address: what they come from.
        length, prompt: tokens of each answer, and what it answers.
        alone: what each seed answers without others.
        gap, health: seconds between two events of a stream, and of a health check, at most.
        checks, answers: how many came.
        wrong: what should not have been.
    """

    port: int
    address: str = "127.0.2.1"
    length: int = 100
    prompt: str | list[int] = "Once upon a time"
    alone: dict[int, str] = field(default_factory=dict)
    gap: float = 0.0
    health: float = 0.0
    checks: int = 0
    answers: int = 0
    wrong: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """Forgets what was seen, but for what seeds answer."""
        self.gap = self.health = 0.0
        self.checks = self.answers = 0
        self.wrong = []

    async def learn(self, seeds: Sequence[int]) -> None:
        """What each seed answers alone."""
        async with self._client() as http:
            for seed in seeds:
                self.alone[seed] = await self._answer(http, seed)

    async def watch(self, streams: int, seconds: float) -> None:
        """Stream answers in sequence, and check the health meanwhile."""
        end = time.monotonic() + seconds
        async with self._client() as http:
            item = (self._stream(http, number, end) for number in range(streams))
            await asyncio.gather(self._check(end), *item)

    def _client(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(
            local_address=self.address, limits=httpx.Limits(max_connections=None)
        )
        url = f"http://127.0.0.1:{self.port}"
        return httpx.AsyncClient(base_url=url, transport=transport, timeout=60)

    async def _stream(self, http: httpx.AsyncClient, number: int, end: float) -> None:
        seeds = list(self.alone)
        while time.monotonic() < end:
            seed = seeds[number % len(seeds)]
            number += 1
            try:
                text = await self._answer(http, seed)
            except httpx.HTTPError as error:
                self.wrong.append(f"stream: {type(error).__name__} {error}")
                await asyncio.sleep(0.1)
                continue
            self.answers += 1
            if text != self.alone[seed]:
                self.wrong.append(f"seed {seed}: {text!r}, alone {self.alone[seed]!r}")

    async def _answer(self, http: httpx.AsyncClient, seed: int) -> str:
        body: dict[str, Any] = {"prompt": self.prompt, "seed": seed, "stream": True}
        body |= {"temperature": 1.0, "max_tokens": self.length, "ignore_eos": True}
        text, last = "", time.monotonic()
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line:
                    now = time.monotonic()
                    self.gap, last = max(self.gap, now - last), now
                if line.startswith("data: {"):
                    text += orjson.loads(line[6:])["choices"][0]["text"]
        if line != "" and line != "data: [DONE]":
            self.wrong.append(f"seed {seed}: ended with {line[:200]}")
        return text

    async def _check(self, end: float) -> None:
        """Asks every 50 ms, on a connection of its own."""
        while time.monotonic() < end:
            begun = time.monotonic()
            try:
                async with asyncio.timeout(60):
                    reader, writer = await asyncio.open_connection(
                        "127.0.0.1", self.port, local_addr=(self.address, 0)
                    )
                    writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
                    reply = await reader.read()
                    writer.close()
                if not reply.startswith(b"HTTP/1.1 200 "):
                    self.wrong.append(f"health: {reply[:40]!r}")
            except OSError as error:
                self.wrong.append(f"health: {type(error).__name__} {error}")
            self.health = max(self.health, time.monotonic() - begun)
            self.checks += 1
            await asyncio.sleep(0.05)

"""Clients that behave badly, for a moment and for five minutes."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from jinfer.server.routes import ENDPOINTS
from tests.server.running import ROOT
from tests.server.soak import WORDS, Soak
from tests.server.test_run_server import command, free_port, ready

SOURCE = str(ROOT / "specs" / "smollm2_135m_instruct.toml")


def figures(client: httpx.Client) -> dict[str, float]:
    """Return the metrics."""
    lines = [line for line in client.get("/metrics").text.splitlines() if line[:1] != "#"]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def threads(pid: int) -> int:
    """How many threads a process has."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def soaked(
    clients: int, seconds: float, *more: str, interfaces: tuple[str, ...] = ("openai",)
) -> None:
    """Nothing is left of many clients that behaved badly, and nothing failed."""
    port = free_port()
    # A cache that is soon all in use: its pages take memory when they are first written to.
    cache = ("--set", "engine.kv_tokens=8192", "--queue", "64", "-c", "1024")
    given = (f"smol={SOURCE}", "--port", str(port), "--log-level", "error", *cache, *more)
    with command(*given) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            ready(client, process)
            asyncio.run(Soak(str(client.base_url), interfaces, clients, seconds / 5).run())
            before, begun = resident(process.pid), figures(client)
            begun_threads = threads(process.pid)
            soak = Soak(str(client.base_url), interfaces, clients, seconds)
            asyncio.run(soak.run())
            label = '{model_name="smol"}'
            names = [f"jinfer:num_requests_{what}{label}" for what in ("running", "waiting")]
            end = time.monotonic() + 60
            while any(figures(client)[name] for name in names):
                assert time.monotonic() < end, "somebody still runs"
                time.sleep(0.1)
            found, after = figures(client), resident(process.pid)
            print(dict(soak.codes), dict(soak.asked), f"{soak.whole} whole answers")
            print(f"{before >> 20} MiB before, {after >> 20} MiB after")
            lag = "jinfer:event_loop_lag_seconds"
            looks = {name: found[name] - begun[name] for name in found if name.startswith(lag)}
            seen = looks[f"{lag}_count"]
            late = seen - looks[f'{lag}_bucket{{le="0.05"}}']
            bounds = [name for name in looks if "bucket" in name and looks[name] == seen]
            limit = bounds[0].split('"')[1]
            print(f"event loop: {late:g} of {seen:g} looks late by over 50 ms, at most {limit} s")
            print(f"{threads(process.pid)} threads, {found['jinfer:tasks']:g} tasks")
            assert soak.wrong == []
            assert soak.whole > 0
            assert threads(process.pid) <= begun_threads + 8
            assert found[f"jinfer:kv_cache_usage_perc{label}"] == 0
            assert found["jinfer:tasks"] < 10
            # A moment is too short for all programs to have been made before it.
            assert after < before * 1.1 + (64 << 20) or seconds < 60
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.soak
def test_a_moment_of_clients_that_behave_badly() -> None:
    soaked(8, 3.0)


@pytest.mark.soak
def test_five_minutes_of_clients_that_behave_badly() -> None:
    soaked(64, float(os.environ.get("JINFER_SOAK_SECONDS", "300")), "--warm-up", "before")


@pytest.mark.soak
def test_five_minutes_of_clients_of_three_interfaces() -> None:
    seconds = float(os.environ.get("JINFER_SOAK_SECONDS", "300"))
    interfaces = ("openai", "anthropic", "ollama")
    soaked(64, seconds, "--warm-up", "before", interfaces=interfaces)


HOSTILE: list[Callable[[int], dict[str, Any]]] = [
    lambda i: {"regex": f"(a{{{900 + i}}}){{1000}}"},
    lambda i: {"regex": f"(k{{{200 + i}}}){{300}}"},
    lambda i: {"structured_outputs": {"json": {"const": "x" * (90_000 + i)}}},
    lambda i: {"regex": f"[ab]a{{{30_000_000 + i}}}"},
    lambda i: {"regex": f"(?s)(.*a.{{20}}){{{20 + i}}}"},
    lambda i: {
        "grammar": f"start: (a|b)*\na: /[a-z]/ a | /[a-z]/\nb: /[a-z ]{{1,{i + 1}}}/ b | /x/"
    },
    lambda i: {"regex": f"([ab]a{{{3000 + i}}}){{3000}}"},
    lambda i: {"regex": f"(a?b?c?d?e?f?g?h?i?j?k?l?m?n?o?p? ?){{1,{200 + i}}}"},
]


class Streams:
    """Stream endlessly, and record the longest gap between chunks.

    Attributes:
        gap: seconds; a test sets it to 0.0 to begin anew.
    """

    def __init__(self, http: httpx.AsyncClient, count: int, **fields: Any) -> None:
        self.gap, self._ended = 0.0, asyncio.Event()
        self._http, self._fields = http, fields
        self._tasks = [asyncio.create_task(self._listen()) for _ in range(count)]

    async def _listen(self) -> None:
        fields = {"max_tokens": 900, "stream": True, "ignore_eos": True, **self._fields}
        while not self._ended.is_set():
            body = {"prompt": "Once upon a time", **fields}
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                last = 0.0
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.monotonic()
                    self.gap = max(self.gap, now - last if last else 0.0)
                    last = now
                    if self._ended.is_set():
                        break

    async def end(self) -> None:
        """Waits until the last has ended."""
        self._ended.set()
        await asyncio.gather(*self._tasks)


async def _gaps(http: httpx.AsyncClient, hostile: int) -> list[float]:
    """Seconds between the chunks of four answers, first alone, then during hostile grammars."""

    async def asks(i: int) -> None:
        body = {"prompt": "x", "max_tokens": 450, "temperature": 1.0, "seed": i}
        answer = await http.post("/v1/completions", json=body | HOSTILE[i % len(HOSTILE)](i))
        assert answer.status_code in (200, 400), answer.text
        error = answer.json().get("error")
        assert error is None or error["message"].split(":")[0] in (
            "regex",
            "json_schema",
            "grammar",
        )

    streams = Streams(http, 4, priority=-1)
    await asyncio.sleep(10)
    alone, streams.gap = streams.gap, 0.0
    await asyncio.gather(*map(asks, range(hostile)))
    beside = streams.gap
    await streams.end()
    return [alone, beside]


@pytest.mark.soak
def test_two_hundred_hostile_grammars_keep_nobody_waiting() -> None:
    port = free_port()
    given = (f"smol={SOURCE}", "--port", str(port), "-c", "1024", "--warm-up", "before")
    with command(*given, "--log-level", "error") as process:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=60) as client:
            ready(client, process)

        async def attack() -> list[float]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
                return await _gaps(http, int(os.environ.get("JINFER_SOAK_GRAMMARS", "200")))

        alone, beside = asyncio.run(attack())
        print(f"longest gap: {alone * 1e3:.0f} ms alone, {beside * 1e3:.0f} ms beside them")
        # They and the client share the processors with the streams, on a machine that may be busy.
        assert beside < 1.0 + 5 * alone


@pytest.mark.soak
def test_loading_and_unloading_during_a_stream(tmp_path: Path) -> None:
    """The memory is freed each time, and the other model's stream has no gap."""
    (tmp_path / "guest.toml").write_text(Path(SOURCE).read_text())
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + bytes(40))
    port, times = free_port(), int(os.environ.get("JINFER_SOAK_LOADS", "50"))
    given = [f"smol={SOURCE}", "--models-dir", str(tmp_path), "--port", str(port), "-c", "1024"]
    given += ["--set", "engine.kv_tokens=2048"]  # a cache that is soon all in use
    # As for users: programs are stored ready to run, unless JAX has a cache of its own.
    own = tuple(name for name in os.environ if name.startswith("JAX_"))
    with command(*given, "--log-level", "error", without=own) as process:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=120) as client:
            ready(client, process)
            refused = client.post("/models/load", json={"model": "damaged"})
            assert refused.status_code == 503
            assert str(tmp_path) in refused.json()["error"]["message"]

        async def visit(http: httpx.AsyncClient) -> int:
            """The guest is loaded, answers and leaves; memory of the server afterwards."""
            body = {"model": "guest", "prompt": "Hello", "max_tokens": 8}
            for path, asked in (
                ("/models/load", {"model": "guest"}),
                ("/v1/completions", body),
                ("/models/unload", {"model": "guest"}),
            ):
                answer = await http.post(path, json=asked)
                assert answer.status_code == 200, answer.text
            await asyncio.sleep(0.2)
            return resident(process.pid)

        async def visits() -> tuple[list[int], list[float]]:
            async with httpx.AsyncClient(base_url=url, timeout=600) as http:
                streams = Streams(http, 1, model="smol")
                # The first visits compile what is not stored yet.
                sizes = [await visit(http) for _ in range(3)]
                streams.gap, gaps = 0.0, list[float]()
                await asyncio.sleep(5)
                gaps.append(streams.gap)
                print(f"{sizes[-1] >> 20} MiB, {gaps[-1] * 1e3:.0f} ms alone", flush=True)
                for _ in range(times):
                    streams.gap = 0.0
                    sizes.append(await visit(http))
                    gaps.append(streams.gap)
                    print(f"{sizes[-1] >> 20} MiB, {gaps[-1] * 1e3:.0f} ms", flush=True)
                await streams.end()
                return sizes[2:], gaps

        sizes, (alone, *gaps) = asyncio.run(visits())
    print(f"longest gaps: {alone * 1e3:.0f} ms alone, {max(gaps) * 1e3:.0f} ms beside visits")
    assert sizes[-1] < sizes[0] * 1.05
    assert max(gaps) < 0.1


# An operator's: what comes after them waits for the streams to end.
OPERATING = ("/models/unload", "/sleep")
LISTED = [path for item in ENDPOINTS for path in item.paths if ":path" not in path]
PATHS = [path for path in LISTED if path not in OPERATING]


def _random_request(rng: random.Random) -> tuple[str, str, bytes, dict[str, str]]:
    """Method, path, body and headers: a quarter is right, and none is long to answer."""
    body = orjson.dumps(
        {
            "model": rng.choice(["smol", "smol", "other", ""]),
            "prompt": " ".join(rng.choices(WORDS, k=rng.randint(1, 20))),
            "messages": [{"role": "user", "content": rng.choice(WORDS)}],
            "input": rng.choice(WORDS),
            "max_tokens": rng.randint(1, 4),
            rng.choice(["temperature", "top_p", "n", "seed", "stop"]): rng.choice(
                [0, 1, 0.5, "x", None, [], {}, 1e9, -1]
            ),
        }
    )
    what = rng.randrange(4)
    if what == 0:
        fields = {"prompt": rng.choice(WORDS), "max_tokens": rng.randint(1, 4), "seed": 1}
        return "POST", "/v1/completions", orjson.dumps(fields), {}
    if what == 1:
        return "POST", rng.choice(["/v1/completions", "/v1/chat/completions"]), body, {}
    if what == 2:
        damaged = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        return "POST", rng.choice(PATHS), bytes(damaged), {}
    method = rng.choice(["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "POST", "PATCH"])
    path = "/" + "/".join(rng.choices([*WORDS, "v1", "..", "%2e%2e", "%00"], k=rng.randint(0, 3)))
    headers = {f"X-{rng.choice(WORDS)}": rng.choice(WORDS) * rng.randint(1, 200)}
    return method, path, rng.randbytes(rng.randint(0, 300)), headers


@pytest.mark.soak
def test_ten_thousand_random_requests_keep_no_stream_waiting() -> None:
    port = free_port()
    given = (f"smol={SOURCE}", "--port", str(port), "-c", "1024", "--warm-up", "before")
    cache = (
        "--set",
        "engine.kv_tokens=20480",
        "-np",
        "20",
        "--queue",
        "64",
        "--log-level",
        "error",
    )
    statuses: Counter[int] = Counter()
    requests = int(os.environ.get("JINFER_SOAK_REQUESTS", "10000"))
    with command(*given, *cache) as process:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=60) as client:
            ready(client, process)

        async def asks(http: httpx.AsyncClient, rng: random.Random, count: int) -> None:
            for _ in range(count):
                method, path, body, headers = _random_request(rng)
                answer = await http.request(method, path, content=body, headers=headers)
                statuses[answer.status_code] += 1

        async def attack() -> tuple[list[tuple[float, float]], list[int]]:
            limits = httpx.Limits(max_connections=None)
            gaps, memory = [], []
            async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
                streams = Streams(http, 16)
                await asyncio.sleep(5)
                for part in range(5):
                    streams.gap = 0.0
                    await asyncio.sleep(10)
                    alone, streams.gap = streams.gap, 0.0
                    memory.append(resident(process.pid))
                    rngs = (random.Random(4 * part + i) for i in range(4))
                    await asyncio.gather(*(asks(http, rng, requests // 20) for rng in rngs))
                    gaps.append((alone, streams.gap))
                memory.append(resident(process.pid))
                await streams.end()
            return gaps, memory

        gaps, memory = asyncio.run(attack())
        print("longest gaps in s, alone and beside:", [f"{a:.2f} {b:.2f}" for a, b in gaps])
        print("MiB:", [amount >> 20 for amount in memory], dict(statuses))
        assert not [status for status in statuses if status >= 500 and status != 501]
        # They and the client share the processors with the streams, on a machine that may be busy.
        assert max(beside for _, beside in gaps) < 0.2 + 2 * max(alone for alone, _ in gaps)
        # By the third part all pages of the cache have been written to.
        assert memory[-1] < memory[3] + (32 << 20)

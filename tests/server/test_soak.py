"""Clients that behave badly, for a moment and for five minutes."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from jinfer.server.routes import ENDPOINTS
from tests.server.running import ROOT
from tests.server.soak import Soak
from tests.server.test_process import command, free_port, ready

SOURCE = str(ROOT / "specs" / "smollm2_135m_instruct.toml")


def figures(client: httpx.Client) -> dict[str, float]:
    """What /metrics says."""
    lines = [line for line in client.get("/metrics").text.splitlines() if line[:1] != "#"]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def soaked(clients: int, seconds: float, *more: str) -> None:
    """Nothing is left of many clients that behaved badly, and nothing failed."""
    port = free_port()
    # A cache that is soon all in use: its pages take memory when they are first written to.
    cache = ("--set", "engine.kv_tokens=8192", "--queue", "64", "-c", "1024")
    given = (f"smol={SOURCE}", "--port", str(port), "--log-level", "error", *cache, *more)
    with command(*given) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            ready(client, process)
            asyncio.run(Soak(str(client.base_url), clients, seconds / 5).run())
            before, begun = resident(process.pid), figures(client)
            soak = Soak(str(client.base_url), clients, seconds)
            asyncio.run(soak.run())
            label = '{model_name="smol"}'
            names = [f"jinfer:num_requests_{what}{label}" for what in ("running", "waiting")]
            end = time.monotonic() + 60
            while any(figures(client)[name] for name in names):
                assert time.monotonic() < end, "somebody still runs"
                time.sleep(0.1)
            found, after = figures(client), resident(process.pid)
            print(dict(soak.codes), f"{soak.whole} whole answers")
            print(f"{before >> 20} MiB before, {after >> 20} MiB after")
            lag = "jinfer:event_loop_lag_seconds"
            looks = {name: found[name] - begun[name] for name in found if name.startswith(lag)}
            seen = looks[f"{lag}_count"]
            late = seen - looks[f'{lag}_bucket{{le="0.05"}}']
            bounds = [name for name in looks if "bucket" in name and looks[name] == seen]
            most = bounds[0].split('"')[1]
            print(f"event loop: {late:g} of {seen:g} looks late by over 50 ms, at most {most} s")
            assert soak.wrong == []
            assert soak.whole > 0
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


async def _gaps(http: httpx.AsyncClient, hostile: int) -> list[float]:
    """Seconds between the pieces of four answers, first alone, then beside hostile grammars."""
    gaps, ended = [0.0], asyncio.Event()
    fields = {"max_tokens": 900, "stream": True, "ignore_eos": True, "priority": -1}

    async def listens() -> None:
        while not ended.is_set():
            body = {"prompt": "Once upon a time", **fields}
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                last = 0.0
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.monotonic()
                    gaps[-1] = max(gaps[-1], now - last if last else 0.0)
                    last = now
                    if ended.is_set():
                        break

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

    listeners = [asyncio.create_task(listens()) for _ in range(4)]
    await asyncio.sleep(10)
    gaps.append(0.0)
    await asyncio.gather(*map(asks, range(hostile)))
    ended.set()
    await asyncio.gather(*listeners)
    return gaps


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
                return await _gaps(http, 200)

        alone, beside = asyncio.run(attack())
        print(f"longest gap: {alone * 1e3:.0f} ms alone, {beside * 1e3:.0f} ms beside them")
        # They and the client share the processors with the streams, on a machine that may be busy.
        assert beside < 1.0 + 5 * alone


@pytest.mark.soak
def test_the_description_is_kept_to() -> None:
    """schemathesis sends what the description allows, and what it forbids."""
    port = free_port()
    given = (f"smol={SOURCE}", "--port", str(port), "-c", "64", "--log-level", "error")
    with command(*given) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            ready(client, process)
        checks = (
            "not_a_server_error",
            "status_code_conformance",
            "content_type_conformance",
            "response_schema_conformance",
            "negative_data_rejection",
            "unsupported_method",
            "allow_header_conformance",
        )
        # Other paths of the same routes are left out, and the one whose answer is always 501.
        others = [path for one in ENDPOINTS for path in one.paths[1:]] + ["/classify"]
        plain = [path.replace(":path", "") for path in others]
        excluded = [word for path in plain for word in ("--exclude-path", path)]
        asked = [
            *("-m", "schemathesis.cli", "run", f"http://127.0.0.1:{port}/openapi.json", *excluded),
            *("--phases", "coverage,fuzzing", "--max-examples", "100"),
            *("--checks", ",".join(checks)),
            *("--continue-on-failure", "--request-timeout", "120", "--no-color"),
        ]
        done = subprocess.run([sys.executable, *asked], capture_output=True, text=True)
        print(done.stdout[-2000:])
        assert done.returncode == 0, done.stdout[-20_000:]

"""A service under attack, left by its clients, and stopped for a while."""

import asyncio
import os
import random
import signal
import time
from typing import Any

import httpx
import orjson
import pytest

from tests.server.attack_watch import Watch, attacked
from tests.server.running import SMOL, Running, serving
from tests.server.test_run_server import LLAMA, command, free_port, ready
from tests.server.test_soak import SOURCE

SECONDS = float(os.environ.get("JINFER_SOAK_SECONDS", "300"))
KINDS = ("idle", "heads", "bodies")


async def attack_in_turn(port: int, watch: Watch, streams: int, seconds: float) -> None:
    """Attacks of each kind in turn, by an address with 5,000 connections and by 200 with 20."""
    await watch.learn(range(8))
    rounds = max(1, round(seconds / 180))
    item = seconds / rounds / len(KINDS)
    total, lost = 0, list[str]()
    for kind in KINDS * rounds:
        watch.begin()
        async with attacked(port, kind, 5000, 1) as single, attacked(port, kind, 20, 200) as many:
            await watch.watch(streams, item)
        print(
            f"{kind}: longest gap {watch.gap:.2f} s, longest /health {watch.health:.2f} s, "
            f"{watch.checks} checks, {watch.answers} answers, {len(watch.wrong)} lost; "
            f"one address {single[0]}, 200 {many[0]}",
            flush=True,
        )
        total, lost = total + watch.answers, lost + watch.wrong
        assert watch.checks > 0
        # They and the attackers share the processors, on a machine that may be busy.
        assert max(watch.gap, watch.health) < 60
    assert lost == []
    assert total > 0


@pytest.mark.soak
def test_streams_under_attack() -> None:
    port = free_port()
    given = (f"smol={SOURCE}", "--port", str(port), "-c", "256", "-np", "16", "--warm-up", "before")
    with command(*given, "--log-level", "error") as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            ready(client, process)
        asyncio.run(attack_in_turn(port, Watch(port), 16, SECONDS))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize("kind", ["idle", pytest.param("unread", marks=pytest.mark.soak)])
def test_a_short_attack(kind: str) -> None:
    """Attackers and clients share an address, as behind a proxy."""
    port = free_port()
    given = (f"tiny={LLAMA}", "--port", str(port), "--warm-up", "off", "--log-level", "error")
    with command(*given) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            ready(client, process)
        watch = Watch(port, "127.0.0.1", prompt=[5, 6, 7])

        async def attack() -> None:
            await watch.learn(range(2))
            async with attacked(port, kind, 5000, 1):
                await watch.watch(2, 1.0)

        asyncio.run(attack())
        assert watch.wrong == []
        assert watch.checks > 0


@pytest.mark.soak
def test_a_thousand_streams_that_are_left_while_they_decode() -> None:
    """All slots and blocks are free afterwards."""

    async def leave(http: httpx.AsyncClient, rng: random.Random) -> None:
        body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            left = rng.randint(1, 4)
            async for line in answer.aiter_lines():
                left -= line.startswith("data: {")
                if not left:
                    return

    async def leave_all(server: Running) -> None:
        rng = random.Random(1)
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as http:
            for _ in range(1000 // 8):
                await asyncio.gather(*(leave(http, rng) for _ in range(8)))

    with serving([SMOL]) as server:
        asyncio.run(leave_all(server))
        assert server.holds_nothing()
        engine: Any = server.model().llm.session.engine
        assert not engine.scheduler.running
        assert len(engine.scheduler._free) == engine.scheduler.slots
        assert not server.service.answers


def test_stopped_clients_and_a_stopped_server() -> None:
    """A client that does not read keeps no other waiting; a server that was stopped goes on."""
    port = free_port()
    given = (f"tiny={LLAMA}", "--port", str(port), "--warm-up", "off", "--log-level", "error")
    body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "seed": 1}
    url = f"http://127.0.0.1:{port}"
    with command(*given) as process, httpx.Client(base_url=url, timeout=60) as client:
        ready(client, process)
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        streamed = {**body, "stream": True}
        with (
            client.stream("POST", "/v1/completions", json={**streamed, "logprobs": 5}),
            client.stream("POST", "/v1/completions", json=streamed) as answer,
        ):
            lines = (line for line in answer.iter_lines() if line)
            events = [next(lines)]
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            process.send_signal(signal.SIGCONT)
            events += lines
        assert events.pop() == "data: [DONE]"
        found = [orjson.loads(line[6:])["choices"][0]["text"] for line in events]
        assert "".join(found) == whole
        assert client.get("/health").status_code == 200

"""A batch during interactive requests, and a killed server with a batch."""

import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import ROOT
from tests.server.test_run_server import command, free_port, ready

SOURCE = str(ROOT / "specs" / "smollm2_135m_instruct.toml")
CHAT = "/v1/chat/completions"

pytestmark = pytest.mark.soak


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[httpx.Client, Any]]:
    port = free_port()
    given = (f"smol={SOURCE}", "--port", str(port), "-c", "1024", "-np", "8", "--queue", "4")
    more = ("--files-dir", str(folder), "--log-level", "error", "--warm-up", "before")
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
    with command(*given, *more) as process, client:
        ready(client, process)
        yield client, process


def begun(client: httpx.Client, count: int, **more: Any) -> str:
    """A batch of so many requests."""
    lines = []
    for i in range(count):
        messages = [{"role": "user", "content": f"Tell me something about the number {i}."}]
        body = {"messages": messages, "temperature": 0, **more}
        lines.append({"custom_id": str(i), "method": "POST", "url": CHAT, "body": body})
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", data)}).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    return client.post("/v1/batches", json=body).json()["id"]


def counts(client: httpx.Client, id: str) -> dict[str, int]:
    return client.get(f"/v1/batches/{id}").json()["request_counts"]


def first_tokens(client: httpx.Client, count: int, seed: int) -> list[float]:
    """Milliseconds until each of some answers begins."""
    found = []
    for i in range(count):
        text = f"Question {seed}.{i}: " + "why is the sky blue, and not green? " * 6
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 6, "stream": True}
        start = time.perf_counter()
        with client.stream("POST", CHAT, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            begun = 0.0
            for line in answer.iter_lines():
                if not begun and '"content":"' in line and '"content":""' not in line:
                    begun = time.perf_counter()
            found.append(1e3 * (begun - start))
        time.sleep(0.05)
    return found


def test_first_tokens_during_a_batch(tmp_path: Path) -> None:
    with served(tmp_path) as (client, _):
        first_tokens(client, 5, 0)
        alone = first_tokens(client, 40, 1)
        id = begun(client, 500, max_tokens=300, ignore_eos=True)
        time.sleep(5)
        before = counts(client, id)["completed"]
        beside = first_tokens(client, 40, 2)
        done = counts(client, id)["completed"] - before
        client.post(f"/v1/batches/{id}/cancel")
        for name, values in (("alone", alone), ("beside a batch", beside)):
            middle, late = statistics.median(values), sorted(values)[-3]
            print(f"first token {name}: median {middle:.0f} ms, 95% {late:.0f} ms")
        print(f"answers of the batch meanwhile: {done}")
        assert done > 0
        assert statistics.median(beside) < 50 + 1.5 * statistics.median(alone)


def test_a_server_that_is_killed(tmp_path: Path) -> None:
    with served(tmp_path) as (client, process):
        id = begun(client, 120, max_tokens=24)
        while counts(client, id)["completed"] < 30:
            time.sleep(0.05)
        known = counts(client, id)["completed"]
        process.kill()
    for _ in range(2):
        with served(tmp_path) as (client, process):
            while counts(client, id)["completed"] < min(120, known + 40):
                time.sleep(0.05)
            found = counts(client, id)["completed"]
            assert found >= known
            print(f"{known} answers at the kill, {found} later")
            known = found
            process.kill()
    with served(tmp_path) as (client, _):
        while (batch := client.get(f"/v1/batches/{id}").json())["status"] != "completed":
            time.sleep(0.1)
        data = client.get(f"/v1/files/{batch['output_file_id']}/content").text
        ids = [json.loads(line)["custom_id"] for line in data.splitlines()]
        assert sorted(ids, key=int) == [str(i) for i in range(120)]

"""A service of several processes: a process does not respond, a process is lost."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import orjson
import pytest

from jinfer.engine.engine import Engine
from jinfer.server import app
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from jinfer.server.models import model_manager
from tests.server.running import GOLDENS, Running, serving
from tests.server.test_operation import until

LLAMA = ModelSource("llama", str(GOLDENS / "llama2"), {"dtype": "float32"})
ASKED: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}


@dataclass
class Job:
    """As a group of processes looks to a service."""

    exit_callbacks: list[Any] = field(default_factory=list)
    complains: str = ""
    parting: bool = False

    def unavailable_reason(self) -> str:
        return self.complains


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    found = Job()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(app, "current_group", lambda: found)
        patched.setattr(model_manager, "current_group", lambda: found)
        yield found


@pytest.fixture(scope="module")
def running(job: Job) -> Iterator[Running]:
    with serving([LLAMA], ServerSettings(warm_up=False, ping=0.05)) as found:
        yield found


@pytest.fixture
def waiting(running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine waits, as it does for a process that does not answer."""
    going_on, step = threading.Event(), Engine.step

    def wait(self: Engine) -> Any:
        going_on.wait(60)
        return step(self)

    monkeypatch.setattr(Engine, "step", wait)
    yield
    going_on.set()


def post(running: Running, **more: Any) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/completions", json={**ASKED, **more}, timeout=60)


def test_a_process_that_does_not_answer(job: Job, running: Running) -> None:
    """Nothing is taken in meanwhile; it goes on where the process does."""
    job.complains = "process 1 of 2 at 10.0.0.2:99 has not answered for 12 s"
    try:
        health, answer = httpx.get(f"{running.url}/health"), post(running, max_tokens=2)
    finally:
        job.complains = ""
    assert health.status_code == 503
    assert "process 1 of 2 at 10.0.0.2:99" in health.json()["error"]["message"]
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "process_silent"
    assert "has not answered for 12 s; try again later" in answer.json()["error"]["message"]
    assert "retry-after" in answer.headers
    assert httpx.get(f"{running.url}/health").json() == {"status": "ok"}
    assert post(running, max_tokens=2).status_code == 200


def test_deadlines_are_kept_while_the_engine_waits(
    running: Running, waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = running.service
    monkeypatch.setitem(vars(service), "settings", replace(service.settings, timeout=0.2))
    for stream in (False, True):
        begun = time.monotonic()
        answer = post(running, stream=stream)
        assert "deadline_exceeded" in answer.text
        assert time.monotonic() - begun < 20
    vectors = {"input": [[5, 6, 7]], "model": "llama"}
    answer = httpx.post(f"{running.url}/v1/embeddings", json=vectors, timeout=60)
    assert answer.json()["error"]["code"] == "deadline_exceeded"


def test_a_lost_process_ends_streams_with_an_event(
    job: Job, running: Running, waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_NOTIFY_SECONDS", 30.0)  # for a slow machine
    body = {**ASKED, "stream": True}
    with ThreadPoolExecutor(1) as pool, running.client() as http:
        asked = pool.submit(post, running)
        with http.stream("POST", "/v1/completions", json=body) as stream:
            assert stream.status_code == 200
            until(lambda: len(running.service.answers) == 2, 30)
            (farewell,) = job.exit_callbacks
            farewell("process 1 of 2 at 10.0.0.2:99 was lost; the job ends")
            stream.read()
        whole = asked.result()
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "process_lost")
    event = orjson.loads(stream.text.rstrip().splitlines()[-1].removeprefix("data: "))
    assert event["error"]["message"] == "process 1 of 2 at 10.0.0.2:99 was lost; the job ends"
    assert event["error"]["code"] == "process_lost"

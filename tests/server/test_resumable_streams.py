"""Resumable streams: they outlive their client, as llama.cpp's page needs."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from jinfer.server.http.http_errors import ApiError, shutting_down
from jinfer.server.http.http_responses import StreamedResponse
from jinfer.server.http.server_settings import ServerSettings
from jinfer.server.models.model_registry import ModelRegistry
from jinfer.server.stores import resumable_streams
from jinfer.server.stores.resumable_streams import ResumableStream, ResumableStreams
from tests.server.running import GOLDENS, Running, serving

ID = "page::owner/a model"
BODY: dict[str, Any] = {
    "prompt": [5, 6, 7],
    "max_tokens": 40,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model in the server's process."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "one").symlink_to(GOLDENS / "llama2")
    keys: dict[str, Any] = {"dtype": "float32", "engine": {"slots": 2}}
    settings = ServerSettings(warm_up=False, ping=0.05)
    with serving(ModelRegistry((), folder, None, keys), settings) as running:
        yield running
        assert running.holds_nothing()


@pytest.fixture
def http(running: Running) -> Iterator[httpx.Client]:
    with running.client(headers={"X-Conversation-Id": ID}, params={"conv_id": ID}) as http:
        yield http


def text_of(data: str) -> str:
    """The events without their numbers."""
    return "".join(line + "\n" for line in data.splitlines() if not line.startswith(("id:", ":")))


def begun(http: httpx.Client, **more: Any) -> str:
    """Read the first events of a stream, and disconnect."""
    with http.stream("POST", "/v1/completions", json=BODY | more) as answer:
        assert answer.status_code == 200
        return next(piece for piece in answer.iter_text() if piece != ": ping\n\n")


def test_a_client_that_goes_and_comes_back(running: Running, http: httpx.Client) -> None:
    with running.client() as plain:
        whole = plain.post("/v1/completions", json=BODY)
    seen = begun(http)
    rest = http.get("/v1/stream", params={"conv_id": ID, "from": len(seen.encode())})
    assert rest.headers["content-type"].startswith("text/event-stream")
    got = text_of(seen + rest.text)
    assert got.endswith("data: [DONE]\n\n")
    assert got.count('"text"') == whole.text.count('"text"')
    again = http.get("/v1/stream", params={"conv_id": ID, "from": 0})
    assert again.text == seen + rest.text
    # As a browser's EventSource asks: behind the last event that it has seen.
    number = int(again.text.splitlines()[0].removeprefix("id: "))
    behind = http.get("/v1/stream", headers={"Last-Event-ID": str(number)})
    assert behind.text == again.text.split("\n\n", 1)[1]
    asked = {"conversation_ids": [ID, "another"]}
    (state,) = http.post("/v1/streams/lookup", json=asked).json()
    assert (state["conversation_id"], state["is_done"]) == (ID, True)
    assert state["total_bytes"] == len(again.content)
    assert state["started_at"] <= state["completed_at"] <= time.time()


def test_stopping(running: Running, http: httpx.Client) -> None:
    begun(http, max_tokens=-1)
    stopped = http.delete("/v1/stream")
    assert (stopped.status_code, stopped.content) == (204, b"")
    assert http.delete("/v1/stream").status_code == 204
    assert http.get("/v1/stream").status_code == 404
    assert running.holds_nothing()


def test_one_conversation_has_one_stream() -> None:
    """The next stream, or the server's end, ends it with an error for its readers."""

    async def pieces() -> AsyncGenerator[bytes]:
        yield b"data: 1\n\n"
        await asyncio.Event().wait()

    async def events(reply: StreamedResponse) -> bytes:
        return b"".join([piece async for piece in reply.pieces])

    async def steps() -> list[bytes]:
        streams, answers = ResumableStreams(), set[asyncio.Future[None]]()
        reply = await streams.start("a", StreamedResponse(pieces()), 9.0, answers)
        first = asyncio.ensure_future(events(reply))
        await asyncio.sleep(0.01)
        reply = await streams.start("a", StreamedResponse(pieces()), 9.0, answers)
        second = asyncio.ensure_future(events(reply))
        await asyncio.sleep(0.01)
        for one in answers:
            one.cancel(shutting_down())
        told = [await first, await second]
        # Before it has begun to run.
        reply = await streams.start("a", StreamedResponse(pieces()), 9.0, answers)
        await streams.stop("a")
        with pytest.raises(ApiError, match="was cancelled"):
            await events(reply)
        assert not answers
        return told

    first, second = asyncio.run(steps())
    assert b"the stream was cancelled" in first
    assert second.startswith(b"id: 0\ndata: 1\n\nid: 1\ndata: ")
    assert b"the service is closing" in second


def test_what_is_refused(http: httpx.Client) -> None:
    """A stream that is refused is as without the header, and leaves nothing."""
    answer = http.post("/v1/completions", json=BODY | {"prompt": [5] * 9999})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert http.get("/v1/stream").status_code == 404
    wrong_ones: list[tuple[dict[str, str], dict[str, Any], str]] = [
        ({}, {"conv_id": ""}, "conv_id"),
        ({}, {"conv_id": ID, "from": "-1"}, "from"),
        ({}, {"conv_id": ID, "from": 10**9}, "from"),
        ({"Last-Event-ID": "x"}, {"conv_id": ID}, "Last-Event-ID"),
    ]
    for headers, query, param in wrong_ones:
        begun(http, max_tokens=1)
        wrong = http.get("/v1/stream", params=query, headers=headers)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param)
    long = {"X-Conversation-Id": "x" * 600}
    assert http.post("/v1/completions", json=BODY, headers=long).status_code == 400
    with patch.object(resumable_streams, "MAX_RUNNING", 0):
        assert http.post("/v1/completions", json=BODY).status_code == 429
    # What is not streamed has nothing to resume.
    http.post("/v1/completions", json=BODY | {"stream": False})
    assert http.delete("/v1/stream").status_code == 204


def test_bounds() -> None:
    """The oldest events of a long stream go, and then the oldest streams."""
    stream = ResumableStream(id="a", max_bytes=100)
    for number in range(20):
        stream.append(b"data: %d\n\n" % number)
    assert stream.total - stream.dropped <= 100
    assert stream.place_of(stream.dropped)[1] == 0
    with pytest.raises(Exception, match="are available"):
        stream.place_of(0)
    streams = ResumableStreams()
    for id in "abc":
        streams.streams[id] = ResumableStream(id=id, total=40 << 20)
        streams.streams[id].close()
    assert streams.find("c").id == "c"
    assert list(streams.streams) == ["c"]
    streams.streams["c"].completed = time.time() - 3600
    with pytest.raises(Exception, match="no stream"):
        streams.find("c")

"""What an operator counts on: keys, limits, a bounded queue, ends, several models."""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from jinfer.engine.engine import Engine
from jinfer.server.http.request_log import JsonLines
from jinfer.server.http.server_settings import ModelSource, ServerSettings
from tests.server.running import GOLDENS, SMOL, Running, serving

TINY = {"dtype": "float32", "engine.slots": 2, "engine.queue": 3}
LLAMA = ModelSource("llama", str(GOLDENS / "llama2"), TINY)
LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny() -> Iterator[Running]:
    """A small model without a tokenizer: ids in, ids out."""
    settings = ServerSettings(
        keys=("first", "sécond"),
        body_seconds=1.0,
        max_prompts=4,
        cors=("https://page.example",),
        retry_after=7,
        warm_up=False,
    )
    with serving([LLAMA], settings) as running:
        yield running


KEY = {"authorization": "Bearer first"}


def post(running: Running, body: Any, path: str = "/v1/completions", **more: Any) -> httpx.Response:
    given = {"headers": KEY, "json": body, "timeout": 60} | more
    return httpx.post(running.url + path, **given)


def test_ids_without_a_tokenizer(tiny: Running) -> None:
    answer = post(tiny, {**LONG, "max_tokens": 4, "return_token_ids": True}).json()
    assert len(answer["choices"][0]["token_ids"]) == 4
    error = post(tiny, {"prompt": "text"}).json()["error"]
    assert "no tokenizer" in error["message"]
    assert post(tiny, {"content": "a"}, "/tokenize").status_code == 400
    messages = {"messages": [{"role": "user", "content": "a"}]}
    assert post(tiny, messages, "/v1/chat/completions").status_code == 400


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Basic first"}, 401),
        ({"authorization": "first"}, 401),
        ({"x-api-key": "firs"}, 401),
        ({"x-api-key": "first"}, 200),
        ({"authorization": "bearer first"}, 200),
        ({"authorization": "Bearer sécond".encode()}, 200),
    ],
)
def test_keys(tiny: Running, headers: dict[str, Any], status: int) -> None:
    for path in ("/v1/models", "/metrics", "/docs", "/props"):
        answer = httpx.get(tiny.url + path, headers=headers)
        assert answer.status_code == status, path
    assert httpx.get(f"{tiny.url}/health").status_code == 200
    if status == 401:
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"
        with (
            openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


def test_browsers(tiny: Running) -> None:
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    answer = httpx.options(f"{tiny.url}/v1/completions", headers=asked)
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    other = httpx.options(
        f"{tiny.url}/v1/completions", headers={**asked, "origin": "https://other.example"}
    )
    assert "access-control-allow-origin" not in other.headers


def test_a_bounded_queue(tiny: Running) -> None:
    """Two requests run, three wait, the others get a 429."""
    with ThreadPoolExecutor(12) as pool:
        with standing(tiny):
            answers = [pool.submit(post, tiny, {**LONG, "max_tokens": 8}) for _ in range(12)]
            until(lambda: submitted(tiny, len(answers)), 60)
        codes = [answer.result().status_code for answer in answers]
        refused = next(a.result() for a in answers if a.result().status_code == 429)
    assert codes.count(200) == 5
    assert codes.count(429) == 7
    assert refused.headers["retry-after"] == "7"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    stream = post(tiny, {**LONG, "max_tokens": 8, "stream": True})
    assert stream.status_code == 200
    assert tiny.holds_nothing()


def test_a_stream_that_waits_has_its_status_at_once(
    tiny: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed here; what cannot be answered has its own status all the same."""
    monkeypatch.setattr(Engine, "step", lambda engine: [])
    body = {**LONG, "stream": True}
    with contextlib.ExitStack() as stack:
        for path in ["/v1/completions", "/completion"] * 2 + ["/v1/completions"]:
            waits = httpx.stream("POST", tiny.url + path, json=body, headers=KEY, timeout=60)
            answer = stack.enter_context(waits)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
        assert post(tiny, body).status_code == 429
        assert post(tiny, {**body, "prompt": [9] * 9999}).status_code == 400
        assert tiny.model().llm.stats().waiting == 5
    assert tiny.holds_nothing()


@pytest.mark.parametrize("stream", [True, False])
def test_http_of_before_there_were_chunks(tiny: Running, stream: bool) -> None:
    """A stream to HTTP/1.0 ends with its connection, and comes in pieces all the same."""
    body = orjson.dumps({**LONG, "max_tokens": 8, "stream": stream})
    head = "POST /v1/completions HTTP/1.0\r\nAuthorization: Bearer first\r\n"
    host, port = tiny.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 60) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    headers, _, said = answer.partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.")
    assert b"transfer-encoding" not in headers
    assert b"connection: close" in headers
    assert (b"content-length" in headers) != stream
    if stream:
        assert said.startswith(b"data: {")
        assert said.endswith(b"data: [DONE]\n\n")
    else:
        assert orjson.loads(said)["usage"]["completion_tokens"] == 8


def test_too_many_prompts(tiny: Running) -> None:
    error = post(tiny, {**LONG, "prompt": [[5]] * 5}).json()["error"]
    assert error["param"] == "prompt"
    assert "a request may have 4" in error["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_place(tiny: Running, stream: bool) -> None:
    body = orjson.dumps({**LONG, "stream": stream})
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer first\r\n"
    host, port = tiny.url.removeprefix("http://").split(":")
    # The request is there when its client goes, and that is heard.
    with contextlib.nullcontext() if stream else standing(tiny):
        with socket.create_connection((host, int(port))) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if stream:
                assert client.recv(100).startswith(b"HTTP/1.1 200")
            else:
                until(lambda: submitted(tiny, 1), 60)
        until(lambda: not tiny.service.answers, 60)
    assert tiny.holds_nothing()


@contextlib.contextmanager
def standing(running: Running) -> Iterator[None]:
    """An engine that takes nothing in, and computes nothing."""
    begun, release = threading.Event(), threading.Event()

    def stand(engine: Any) -> None:
        begun.set()
        release.wait(60)

    busy = threading.Thread(target=running.model().llm.session.thread.run, args=(stand,))
    busy.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        release.set()
        busy.join()


def submitted(running: Running, count: int) -> bool:
    """Return whether `count` requests wait for a stopped engine: each sends it two messages."""
    return running.model().llm.session.thread._loop.inbox.qsize() >= 2 * count


def until(holds: Any, seconds: float) -> None:
    """Waits until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def test_a_body_that_does_not_come(tiny: Running) -> None:
    host, port = tiny.url.removeprefix("http://").split(":")
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer first\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        answer = b"".join(iter(lambda: client.recv(10_000), b""))  # it comes in two parts
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not arrive" in answer
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        client.shutdown(socket.SHUT_WR)  # half of a connection
        client.recv(10_000)
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(b"\x16\x03\x01\x02 this is no HTTP\r\n\r\n")
        assert client.recv(10_000).startswith(b"HTTP/1.1 400")


def test_an_answer_that_takes_too_long() -> None:
    with serving([LLAMA], ServerSettings(timeout=0.0001, warm_up=False)) as running:
        answer = post(running, LONG)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        stream = post(running, {**LONG, "stream": True})
        told = stream.json() if stream.status_code == 503 else stream.text
        assert "deadline_exceeded" in str(told)


def test_an_error_in_the_middle_of_a_stream(tiny: Running, monkeypatch: Any) -> None:
    engine = tiny.model().llm.session.engine
    step, count = engine.step, 0

    def failing() -> Any:
        nonlocal count
        count += 1
        if count == 10:
            raise ValueError("the device is on fire")
        return step()

    monkeypatch.setattr(engine, "step", failing)
    answer = post(tiny, {**LONG, "stream": True, "return_token_ids": True})
    assert answer.status_code == 200
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    error = orjson.loads(events[-1])["error"]
    assert error["type"] == "server_error"
    assert "fire" not in error["message"]
    monkeypatch.undo()
    assert post(tiny, {**LONG, "max_tokens": 2}).status_code == 200


def test_silence_has_pings() -> None:
    with serving([LLAMA], ServerSettings(ping=0.05, warm_up=False)) as running:
        body = {**LONG, "max_tokens": 2, "stream": True}
        with contextlib.ExitStack() as stack, running.client() as http:
            stack.enter_context(standing(running))
            with http.stream("POST", "/v1/completions", json=body) as answer:
                lines = (line for line in answer.iter_lines() if line)
                assert [next(lines), next(lines)] == [": ping"] * 2
                stack.close()
                *_, last = lines
    assert last == "data: [DONE]"


def test_while_it_loads(monkeypatch: Any) -> None:
    release = threading.Event()

    def slow(source: ModelSource, warm_up: bool) -> Any:
        release.wait(60)
        return opened(source, warm_up)

    from jinfer.server.models.model_residency import open_llm as opened

    monkeypatch.setattr("jinfer.server.models.model_residency.open_llm", slow)
    with serving([LLAMA], wait=False) as running:
        health = httpx.get(f"{running.url}/health")
        assert health.status_code == 503
        assert health.json() == {
            "error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}
        }
        answer = post(running, LONG)
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "unavailable_error"
        assert httpx.get(f"{running.url}/v1/models").json()["data"][0]["id"] == "llama"
        release.set()
        until(lambda: httpx.get(f"{running.url}/health").status_code == 200, 60)
        assert post(running, {**LONG, "max_tokens": 1}).status_code == 200


def test_several_models_of_which_one_fits() -> None:
    sources = [ModelSource(name, str(GOLDENS / "llama2"), TINY) for name in ("one", "two", "three")]
    with serving(sources, ServerSettings(max_loaded=1, warm_up=False)) as running:

        def states() -> list[str]:
            return [model.state for model in running.service.models.models]

        assert states() == ["loaded", "unloaded", "unloaded"]
        body = {**LONG, "max_tokens": 3}
        assert post(running, {**body, "model": "two"}).json()["model"] == "two"
        assert states() == ["unloaded", "loaded", "unloaded"]
        assert post(running, body).json()["model"] == "one"
        # Asked for side by side, each waits until the other is not used any more.
        with ThreadPoolExecutor(6) as pool:
            asked = ["one", "two", "three"] * 2
            answers = list(pool.map(lambda name: post(running, {**body, "model": name}), asked))
        assert [answer.json().get("model") for answer in answers] == asked
        assert states().count("loaded") == 1
        text = httpx.get(f"{running.url}/metrics").text
        assert 'jinfer:generation_tokens_total{model_name="three"} 6.0' in text


def test_a_model_that_cannot_be_loaded_later(tmp_path: Path) -> None:
    sources = [LLAMA, ModelSource("none", str(tmp_path / "nothing"))]
    with serving(sources, ServerSettings(max_loaded=1, warm_up=False)) as running:
        answer = post(running, {**LONG, "model": "none"})
        assert answer.status_code == 503
        assert "could not be loaded" in answer.json()["error"]["message"]
        assert post(running, {**LONG, "max_tokens": 1}).status_code == 200


def test_the_log(tiny: Running, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "jinfer.access"):
        post(tiny, {**LONG, "max_tokens": 3, "user": "u1"}, headers={**KEY, "X-Request-Id": "r1"})
        post(tiny, {"prompt": "my secret"})

        def lines() -> list[Any]:
            found = [one for one in caplog.records if one.msg == "request"]
            return [orjson.loads(JsonLines().format(one)) for one in found]

        until(lambda: len(lines()) == 2, 10)
    first, second = lines()
    assert first["request_id"] == "r1"
    assert (first["status"], first["model"], first["user"]) == (200, "llama", "u1")
    assert (first["prompt_tokens"], first["completion_tokens"]) == (3, 3)
    assert first["finish_reason"] == "length"
    assert second["status"] == 400
    assert "secret" not in str(second)


def test_the_log_with_texts(caplog: Any) -> None:
    with (
        serving([LLAMA], ServerSettings(log_prompts=True, warm_up=False)) as running,
        caplog.at_level(logging.INFO, "jinfer.access"),
    ):
        post(running, {"prompt": "my secret"})
        until(lambda: caplog.records, 10)
    assert "secret" in str([vars(record) for record in caplog.records])


def test_templates_of_requests() -> None:
    settings = ServerSettings(request_templates=True, warm_up=False)
    with serving([SMOL], settings) as running:
        messages = [{"role": "user", "content": "Hello"}]
        template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
        body = {"messages": messages, "chat_template": template}
        assert post(running, body, "/apply-template").json() == {"prompt": "<Hello>"}
        wrong = post(running, {**body, "chat_template": "{% if %}"}, "/v1/chat/completions")
        assert wrong.status_code == 400
        inferflow = {
            "text": "Hello",
            "decoder_input_template": "{query}",
            "is_streaming_mode": False,
            "max_output_len": 2,
        }
        assert post(running, inferflow, "/").status_code == 200
        kept = post(running, {**body, "chat_template": "{% while %}"}, "/tokenize")
        assert kept.status_code == 400
        parts = (
            "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
        )
        listed = post(running, {**body, "chat_template": parts}, "/apply-template")
        assert listed.json() == {"prompt": "Hello"}
        for said in ("i", "<", "end", "The answer is ", ""):
            answer = {"role": "assistant", "content": said}
            going_on = {"messages": [*messages, answer], "continue_final_message": True}
            prompt = post(running, going_on, "/apply-template").json()["prompt"]
            assert prompt.endswith(f"Hello<|im_end|>\n<|im_start|>assistant\n{said}")


def test_the_template_for_conversations_with_tools(
    smol: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = smol.model().session
    tool_use = "{{ tools[0].function.name }}: {{ messages[0].content }}"
    conversation = replace(session.opened.conversation, tool_use=tool_use)
    monkeypatch.setattr(session, "opened", replace(session.opened, conversation=conversation))
    messages = [{"role": "user", "content": "Hello"}]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    body: dict[str, Any] = {"messages": messages, "tools": tools}
    assert post(smol, body, "/apply-template").json() == {"prompt": "weather: Hello"}
    none: list[dict[str, Any]] = [{"tool_choice": "none"}, {"tools": []}]
    for without in none:
        assert "im_start" in post(smol, body | without, "/apply-template").json()["prompt"]


def test_long_texts_do_not_block_the_event_loop(smol: Running) -> None:
    """While long prompts are read, short questions are answered at once."""
    text = "Some words that are not the same as others. " * 60_000  # 2.6 MB

    async def run() -> tuple[float, float]:
        async with httpx.AsyncClient(base_url=smol.url, timeout=60) as client:
            first = time.perf_counter()
            asked = asyncio.create_task(client.post("/v1/completions", json={"prompt": text}))
            slowest = 0.0
            while not asked.done():
                begun = time.perf_counter()
                await client.get("/version")
                slowest = max(slowest, time.perf_counter() - begun)
            assert (await asked).status_code == 400
            return slowest, time.perf_counter() - first

    # Generous: the client, the server and other tests share a few cores.
    slowest, whole = asyncio.run(run())
    assert slowest < max(1.0, whole / 2)


def test_a_limit_of_time(tiny: Running) -> None:
    body = {"prompt": [5, 6], "n_predict": 200, "ignore_eos": True, "t_max_predict_ms": 1}
    assert post(tiny, body, "/completion").status_code == 408

"""What comes before a request is known: heads without an end, slow ones, too many connections."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
import uvicorn

from jinfer.server.http_protocol import HEAD_BYTES, MAX_HEADERS, BoundedProtocol
from jinfer.server.server_settings import ServerSettings
from tests.server.running import Running, serving


class Impatient(BoundedProtocol):
    """Bounds that a test meets soon."""

    head_seconds = 0.5
    max_connections = 8


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """No model: these requests reach none."""
    with serving(
        [], ServerSettings(keys=("secret",), warm_up=False), wait=False, protocol=Impatient
    ) as one:
        yield one


@pytest.fixture
def patient(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """The same, where a head may take as long as a machine with other work needs for it."""
    monkeypatch.setattr(Impatient, "head_seconds", 30.0)
    return server


@contextlib.contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), timeout=20) as connection:
        yield connection


def answer(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


def sent(connection: socket.socket, piece: bytes, most: int) -> int:
    """Bytes that were sent before the other side closed."""
    count = 0
    with contextlib.suppress(ConnectionError):
        while count < most:
            connection.sendall(piece)
            count += len(piece)
    return count


@pytest.mark.parametrize("begin", [b"GET /health HTTP/1.1\r\nx: ", b"GET /", b"GET / HTTP/1.1\r\n"])
def test_a_head_without_an_end_is_refused(patient: Running, begin: bytes) -> None:
    """One value, one line, or headers without number: neither time nor memory grows with them."""
    piece = b"x: y\r\n" * 4096 if begin.endswith(b"\r\n") else b"a" * 24576
    with connected(patient) as connection:
        connection.sendall(begin)
        assert sent(connection, piece, 64 << 20) < 16 << 20
    assert httpx.get(f"{patient.url}/health").status_code in (200, 503)


def test_what_is_refused_says_why(patient: Running) -> None:
    with connected(patient) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx: " + b"a" * (HEAD_BYTES + 1))
        head, _, body = answer(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert str(HEAD_BYTES) in orjson.loads(body)["error"]["message"]
    many = "".join(f"x{i}: y\r\n" for i in range(MAX_HEADERS + 1)).encode()
    with connected(patient) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n" + many + b"\r\n")
        assert b"more than 128 headers" in answer(connection)
    with connected(patient) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 400 ")


def test_large_heads_that_are_allowed(patient: Running) -> None:
    headers = {"x": "a" * (HEAD_BYTES - 2000), **{f"h{i}": "v" for i in range(100)}}
    with httpx.Client(headers=headers) as client:
        for _ in range(3):  # each request of a connection has the whole bound
            assert client.get(f"{patient.url}/health").status_code in (200, 503)


def test_slow_heads_and_idle_connections_are_closed(server: Running) -> None:
    with connected(server) as silent, connected(server) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        begun = time.perf_counter()
        assert b"408" in answer(slow).splitlines()[0]
        assert answer(silent) == b""
        assert time.perf_counter() - begun < 20


def test_a_head_that_drips_is_late_too(server: Running) -> None:
    with connected(server) as connection:
        begun = time.perf_counter()
        with contextlib.suppress(ConnectionError):
            for byte in b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 1000:
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
        assert time.perf_counter() - begun < 20


def test_connections_are_bounded(server: Running) -> None:
    with contextlib.ExitStack() as stack:
        held = [
            stack.enter_context(connected(server)) for _ in range(Impatient.max_connections + 4)
        ]
        closed = 0
        for connection in held[-4:]:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
            closed += 1
        assert closed == 4
    end = time.monotonic() + 20
    while True:  # until those that have gone are not counted any more
        with contextlib.suppress(httpx.TransportError):
            assert httpx.get(f"{server.url}/health").status_code in (200, 503)
            return
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_slow_answer_is_not_cut() -> None:
    """The next request's head may take as long as the answer to this one."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(3 * Impatient.head_seconds)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"late"})

    config = uvicorn.Config(app, port=0, http=Impatient, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        with socket.create_connection(server.servers[0].sockets[0].getsockname()) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\nGET / HT")
            found = answer(connection)
    finally:
        server.should_exit = True
        thread.join(60)
    assert found.startswith(b"HTTP/1.1 200 OK")
    assert b"late" in found

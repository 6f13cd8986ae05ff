"""Attacks before a request is complete: endless and slow heads, too many connections."""

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

from jinfer.server.http.http_protocol import BODY_PIECE, HEAD_BYTES, MAX_HEADERS, BoundedProtocol
from jinfer.server.http.server_settings import ServerSettings
from tests.server.running import Running, serving


class Impatient(BoundedProtocol):
    """Bounds that a test meets soon."""

    head_seconds = 0.5
    max_waiting = 8


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """No model: these requests reach none."""
    with serving(
        [], ServerSettings(keys=("secret",), warm_up=False), wait=False, protocol=Impatient
    ) as item:
        yield item


@pytest.fixture
def patient(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """The same, where a head may take as long as a machine with other work needs for it."""
    monkeypatch.setattr(Impatient, "head_seconds", 30.0)
    return server


@contextlib.contextmanager
def connected(server: Running, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    url = httpx.URL(server.url)
    given = (url.host, url.port), 20, (source, 0)
    with socket.create_connection(*given) as connection:
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
    """A value, a line, or endless headers: neither time nor memory grows with them."""
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


def test_the_beginning_of_a_body_is_late_too(server: Running) -> None:
    """Before it is there no application is started."""
    with connected(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n")
        begun = time.monotonic()
        while time.monotonic() < begun + 20 and sent(connection, b" ", 1):
            time.sleep(0.2)
        assert answer(connection).startswith(b"HTTP/1.1 408 ")


def asked(connection: socket.socket) -> bytes:
    """The status line of a request on a connection; b"" if that was closed."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        return connection.recv(1 << 16).split(b"\r\n")[0]
    return b""


def test_the_oldest_idle_connections_give_way(patient: Running) -> None:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(patient)) for _ in range(Impatient.max_waiting + 4)]
        assert [answer(item) for item in held[:4]] == [b""] * 4
        assert all(asked(item).startswith(b"HTTP/1.1 ") for item in held[4:])


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nx: ", b"POST / HTTP/1.1\r\n"])
def test_an_address_with_few_connections_keeps_them(patient: Running, begun: bytes) -> None:
    """They are the oldest, and another address has many: idle, with slow heads, slow bodies."""
    begun += b"host: a\r\ncontent-length: 9\r\n\r\n" if begun.startswith(b"POST") else b""
    with contextlib.ExitStack() as stack:
        few = [stack.enter_context(connected(patient, "127.0.2.1")) for _ in range(2)]
        many = [stack.enter_context(connected(patient)) for _ in range(40)]
        for item in many:
            with contextlib.suppress(ConnectionError):
                item.sendall(begun)
        assert answer(many[0]) == b""
        assert all(asked(item).startswith(b"HTTP/1.1 ") for item in few)


def test_bodies_share_their_memory() -> None:
    """Where too many bytes of bodies have come, those of the address with most give way."""
    settings = ServerSettings(max_body=10_000, warm_up=False)
    post = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 10000\r\n\r\n"
    with serving([], settings, wait=False) as server, contextlib.ExitStack() as stack:
        limit = server.service.bodies.limit
        one = stack.enter_context(connected(server, "127.0.2.1"))
        one.sendall(post + b" " * 9000)
        many = [stack.enter_context(connected(server)) for _ in range(limit // 9000 + 4)]
        for other in many:
            other.sendall(post + b" " * 9000)
        assert b"before other requests needed its memory" in answer(many[0])
        assert server.service.bodies.total <= limit
        one.sendall(b" " * 1000)
        assert b"not JSON" in one.recv(1 << 16)
    assert server.service.bodies.total == 0


@contextlib.contextmanager
def running(app: Any) -> Iterator[tuple[str, int]]:
    """The address of a server of an application."""
    config = uvicorn.Config(app, port=0, http=Impatient, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()
    finally:
        server.should_exit = True
        thread.join(60)


@pytest.mark.parametrize("size", [0, 5, BODY_PIECE - 1, BODY_PIECE, 3 * BODY_PIECE + 1])
@pytest.mark.parametrize("piece", [1000, BODY_PIECE])
def test_a_body_in_pieces_is_complete(size: int, piece: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found, more = b"", True
        while more:
            message = await receive()
            found, more = found + message["body"], message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": found})

    head = b"POST / HTTP/1.0\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % size
    with running(app) as place, socket.create_connection(place) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head)
        for begin in range(0, size, piece):
            connection.sendall(body[begin : min(begin + piece, size)])
            time.sleep(0.005)
        found = answer(connection)
    assert found.partition(b"\r\n\r\n")[2] == body[:size]


def test_a_slow_answer_is_not_cut() -> None:
    """The next request's head may take as long as the answer to this request."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(3 * Impatient.head_seconds)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"late"})

    with running(app) as place, socket.create_connection(place) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\nGET / HT")
        found = answer(connection)
    assert found.startswith(b"HTTP/1.1 200 OK")
    assert b"late" in found


def test_requests_that_run_keep_their_connections() -> None:
    """However many idle connections come, also from the same address."""
    many, begun = threading.Event(), threading.Semaphore(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.release()
        await asyncio.to_thread(many.wait, 60)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    count = Impatient.max_waiting + 4
    with running(app) as place, contextlib.ExitStack() as stack:
        held = list[socket.socket]()
        for _ in range(count):
            held.append(item := stack.enter_context(socket.create_connection(place, 60)))
            item.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            assert begun.acquire(timeout=60)
        idle = [stack.enter_context(socket.create_connection(place)) for _ in range(2 * count)]
        assert idle[0].recv(1) == b""
        many.set()
        assert all(b"done" in answer(item) for item in held)


def test_who_does_not_read_gives_way() -> None:
    """Its response runs, and the server waits for it as for an idle client."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    with running(app) as place, contextlib.ExitStack() as stack:
        first = stack.enter_context(socket.create_connection(place, 20))
        first.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert first.recv(1)
        for _ in range(Impatient.max_waiting + 1):
            time.sleep(0.05)
            stack.enter_context(socket.create_connection(place))
        time.sleep(0.2)
        assert len(answer(first)) < 100 << 20

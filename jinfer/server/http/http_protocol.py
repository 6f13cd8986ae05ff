"""HTTP protocol: uvicorn's, with limits of request heads, connection shares, and HTTP/1.0.

The body is bounded where it is read. The request line and headers reach only the protocol, need no
API key, and cost httptools time quadratic in a header's length. A connection holds a share while
the server waits for its client: for a request, for the rest of it, or for the client to read. A
connection whose request runs holds no share, and is kept.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from jinfer.server.http.client_shares import Holder, Shares, client_address, connection_limit
from jinfer.server.http.http_errors import ApiError
from jinfer.server.http.http_responses import dumps

_log = logging.getLogger("jinfer.server")
HEAD_BYTES = 64 << 10  # request line and headers together
MAX_HEADERS = 128
HEAD_SECONDS = 10.0  # to receive the head and the beginning of the body of a request
MAX_WAITING = 10240  # connections whose clients the server waits for
BODY_PIECE = 4096  # bytes of a body from which the application is started or woken
_READ_SECONDS = 0.05  # to read data that arrived in time while the event loop was late
FLUSH_SECONDS = 60.0  # for a client to read its last response
_SHARES = "jinfer.connections"  # key of the server's state


def connection_shares(state: dict[str, Any], limit: int = MAX_WAITING) -> Shares[Holder]:
    """Return the shares of waiting connections, which are kept in the server's state."""
    if _SHARES not in state:
        state[_SHARES] = Shares[Holder](min(limit, connection_limit()))
    shares: Shares[Holder] = state[_SHARES]
    return shares


class BoundedProtocol(HttpToolsProtocol):
    """A connection that bounds the size, header count and time of request heads.

    Responses of unknown length to HTTP/1.0 clients end with the connection.

    Attributes:
        head_seconds, flush_seconds, max_waiting: limits of all connections; tests lower them.
        address: of the client.
    """

    head_seconds = HEAD_SECONDS
    flush_seconds = FLUSH_SECONDS
    max_waiting = MAX_WAITING
    address = ""
    _logged_full = -1.0  # time of the last log line about full connections, in event loop seconds

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._in_head = True  # whether the next bytes belong to a request line or headers
        self._head_bytes = 0
        self._waits_for_body = False  # whether a request's head is complete, and no task has begun
        self._begun_body = bytearray()
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: tuple[int, str] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self.address = client_address(self.client)
        self._shares = connection_shares(self.app_state, self.max_waiting)
        self._expect_head()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the head timer, and end the share."""
        self._cancel_timer()
        self._shares.release(self)
        super().connection_lost(exc)

    def give_way(self) -> None:
        """Close the connection for the benefit of others."""
        self._say_full()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Count the bytes of a head."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"a request's line and headers have more than {HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """Start the next head, perhaps while a response is still being sent (pipelining)."""
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """Check the limits of a complete head."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > HEAD_BYTES:
            self._refusal = 431, f"a request's line and headers have more than {HEAD_BYTES} bytes"
        elif len(self.headers) > MAX_HEADERS:
            self._refusal = 431, f"a request has more than {MAX_HEADERS} headers"
        if self._refusal is not None:
            raise ValueError(self._refusal[1])  # stops the parser; see `send_400_response`
        self._in_head, self._waits_for_body = False, True
        if self.expect_100_continue or self.parser.should_upgrade():
            self._dispatch()

    def _dispatch(self) -> None:
        """Start the application, once enough of a request has arrived."""
        self._waits_for_body = False
        self._cancel_timer()
        self._head_bytes = 0
        super().on_headers_complete()
        if self.cycle is None or self.cycle.scope is not self.scope:
            return  # the connection is upgraded to another protocol
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _UnchunkedSend(self.cycle)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        """Collect small pieces: to start or wake a task costs far more."""
        if self._waits_for_body:
            self._begun_body += body
            if len(self._begun_body) >= BODY_PIECE:
                self._dispatch()
                self._pass_body()
        elif len(self.cycle.body) + len(body) < BODY_PIECE and not self.cycle.response_complete:
            self.cycle.body += body
        else:
            super().on_body(body)

    def _pass_body(self) -> None:
        body, self._begun_body = bytes(self._begun_body), bytearray()
        if body:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Start the request; the next bytes belong to the next request."""
        if self._waits_for_body:
            self._dispatch()
            self._pass_body()
        self._in_head = True
        super().on_message_complete()
        self._run()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request, or for the unread rest of this request."""
        super().on_response_complete()
        if self.cycle.response_complete or self.cycle.more_body:
            self._wait()
        if self.cycle.more_body and self._head_timer is None:
            self._expect_head()
        self._flush()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, unless a request arrives."""
        self.timeout_keep_alive_task = self.loop.call_later(_READ_SECONDS, self._close_idle)

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        """Continue a response after the client has read."""
        super().resume_writing()
        self._run()

    def send_400_response(self, msg: str) -> None:
        """Respond with the reason why a request cannot be parsed, and close the connection."""
        if self.transport.is_closing():
            return
        status, message = self._refusal or (400, msg)
        self._refuse(status, message)

    def _wait(self) -> None:
        self._shares.release(self)  # this connection is now the last in the order
        self._shares.take(self)

    def _run(self) -> None:
        """End the share if the server does not wait for the client."""
        running = self.cycle is not None and not self.cycle.response_complete
        if running and not self.cycle.more_body and not self.flow.write_paused:
            self._shares.release(self)

    def _close_idle(self) -> None:
        super().timeout_keep_alive_handler()
        self._flush()

    def _flush(self) -> None:
        """Limit the time in which the client reads the rest of a closed connection."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self.loop.call_later(self.flush_seconds, self.transport.abort)

    def _say_full(self) -> None:
        """Log that connections are full, at most once a second."""
        if (now := self.loop.time()) - BoundedProtocol._logged_full >= 1:
            BoundedProtocol._logged_full = now
            _log.warning(
                "too many connections wait; closing the oldest of the busiest clients",
                extra={"connections": len(self.connections), "address": self.address},
            )

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._read_once_more)

    def _cancel_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _read_once_more(self) -> None:
        self._head_timer = self.loop.call_later(_READ_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_head()  # its response is still being sent
        elif self._head_bytes:
            self._refuse(408, f"the request did not arrive within {self.head_seconds:g} seconds")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        body = dumps(ApiError(status, message).body())
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        ) % len(body)
        if self.cycle is None or self.cycle.response_complete:  # otherwise it was sent already
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


class _UnchunkedSend:
    """Sends a response unchunked; without a known length, it ends with the connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._measured = True

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            self._measured = b"content-length" in names
            if not self._measured:
                self._cycle.chunked_encoding = False
        elif not self._measured:
            # uvicorn checks the number of bytes sent against Content-Length.
            rest = 1 if message.get("more_body", False) else 0
            self._cycle.expected_content_length = len(message.get("body", b"")) + rest
        await self._send(message)

"""HTTP protocol: uvicorn's, with bounds on connections and heads, and with HTTP/1.0 clients.

The body is bounded where it is read. The request line and headers reach only the protocol, need no
API key, and cost httptools time quadratic in a header's length.
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

from jinfer.server.http_errors import ApiError
from jinfer.server.http_responses import dumps

_log = logging.getLogger("jinfer.server")
HEAD_BYTES = 64 << 10  # request line and headers together
MAX_HEADERS = 128
HEAD_SECONDS = 10.0  # to receive the whole head, from the start of the connection or request
MAX_CONNECTIONS = 1000


class BoundedProtocol(HttpToolsProtocol):
    """A connection that bounds the size, header count and time of request heads.

    Responses of unknown length to HTTP/1.0 clients end with the connection.

    Attributes:
        head_seconds, max_connections: limits of all connections; tests lower them.
    """

    head_seconds = HEAD_SECONDS
    max_connections = MAX_CONNECTIONS
    _said_full = -1.0  # time of the last log line about full connections, in event loop seconds

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._in_head = True  # whether the next bytes belong to a request line or headers
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: tuple[int, str] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts connections; closes one above the limit without a response."""
        if len(self.connections) >= self.max_connections:
            self.transport = transport
            self._say_full()
            transport.abort()
            return
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the head timer."""
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts the bytes of a head."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"a request's line and headers have more than {HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """Starts the next head, perhaps while a response is still being sent (pipelining)."""
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """Checks the limits of a complete head before the request is dispatched."""
        self._cancel_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > HEAD_BYTES:
            self._refusal = 431, f"a request's line and headers have more than {HEAD_BYTES} bytes"
        elif len(self.headers) > MAX_HEADERS:
            self._refusal = 431, f"a request has more than {MAX_HEADERS} headers"
        if self._refusal is not None:
            raise ValueError(self._refusal[1])  # stops the parser; see `send_400_response`
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()
        if self.cycle is None or self.cycle.scope is not self.scope:
            return  # the connection is upgraded to another protocol
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _UnchunkedSend(self.cycle)  # type: ignore[method-assign]

    def on_message_complete(self) -> None:
        """The next bytes belong to the next request."""
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Responds with the reason why a request cannot be parsed, and closes the connection."""
        if self.transport.is_closing():
            return
        status, message = self._refusal or (400, msg)
        self._refuse(status, message)

    def _say_full(self) -> None:
        """Logs that connections are full, at most once a second, so that the log does not grow."""
        if (now := self.loop.time()) - BoundedProtocol._said_full >= 1:
            BoundedProtocol._said_full = now
            _log.warning("too many connections", extra={"connections": len(self.connections)})

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _cancel_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_head()  # its response is still being sent
        elif self._head_bytes:
            self._refuse(408, f"the headers did not come within {self.head_seconds:g} seconds")
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

"""HTTP connections: uvicorn's protocol with bounds on what comes before a request is known.

Everything else that a request may take is bounded where it is answered. What comes before, its line
and headers, is seen by nobody but the protocol, needs no key, and costs httptools time that grows
with the square of a header's length.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

_log = logging.getLogger("jinfer.server")
HEAD_BYTES = 64 << 10  # of a request's line and headers together
MAX_HEADERS = 128
HEAD_SECONDS = 10.0  # until they are whole, from the connection's or the request's begin
MAX_CONNECTIONS = 1000


class BoundedProtocol(HttpToolsProtocol):
    """A connection whose requests' heads are bounded in bytes, number and time.

    Attributes:
        head_seconds, max_connections: of all connections; tests lower them.
    """

    head_seconds = HEAD_SECONDS
    max_connections = MAX_CONNECTIONS
    _said_full = -1.0  # when the log was told, in the loop's seconds

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._in_head = True  # what comes next belongs to a request's line or headers
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: tuple[int, str] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts connections; one too many is closed without a word."""
        if len(self.connections) >= self.max_connections:
            self.transport = transport
            self._say_full()
            transport.abort()
            return
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the time limit."""
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts what belongs to a head."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"a request's line and headers have more than {HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """Another request begins on the connection, maybe while one is answered."""
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """The head is whole: its bounds are checked before anything is started for it."""
        self._cancel_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > HEAD_BYTES:
            self._refusal = 431, f"a request's line and headers have more than {HEAD_BYTES} bytes"
        elif len(self.headers) > MAX_HEADERS:
            self._refusal = 431, f"a request has more than {MAX_HEADERS} headers"
        if self._refusal is not None:
            raise ValueError(self._refusal[1])  # the parser stops, see `send_400_response`
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """What follows is another request's."""
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Says why a request cannot be read, and closes the connection."""
        if self.transport.is_closing():
            return
        status, message = self._refusal or (400, msg)
        self._refuse(status, message)

    def _say_full(self) -> None:
        """A line in the log, at most one a second: whoever fills connections would fill it too."""
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
            self._expect_head()  # it is answered still, and may be slow to send the next
        elif self._head_bytes:
            self._refuse(408, f"the headers did not come within {self.head_seconds:g} seconds")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = orjson.dumps({"error": error})
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        ) % len(body)
        if self.cycle is None or self.cycle.response_complete:  # else in the middle of an answer
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

"""HTTP protocol: uvicorn's, with HTTP/1.0 clients, which do not know chunked encoding."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from jinfer.server.http_limits import BoundedProtocol


class Http10Protocol(BoundedProtocol):
    """A connection that ends responses of unknown length by closing, for HTTP/1.0 clients."""

    def on_headers_complete(self) -> None:
        """Wraps the response of a request before its task runs."""
        super().on_headers_complete()
        if self.cycle is None or self.cycle.scope is not self.scope:
            return  # the connection is upgraded to another protocol
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _UnchunkedSend(self.cycle)  # type: ignore[method-assign]


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

"""HTTP as uvicorn speaks it, and HTTP/1.0, whose clients know no chunks."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from jinfer.server.http_limits import BoundedProtocol


class Protocol(BoundedProtocol):
    """A connection, with whose end an answer of unknown length ends where HTTP/1.0 is spoken."""

    def on_headers_complete(self) -> None:
        """A request has begun; its task has not yet run."""
        super().on_headers_complete()
        if self.cycle is None or self.cycle.scope is not self.scope:
            return  # it is to become something else than HTTP
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _Closing(self.cycle)  # type: ignore[method-assign]


class _Closing:
    """Sends an answer, as it comes if it has no length."""

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
            # uvicorn compares the lengths of what was sent and of what was announced.
            rest = 1 if message.get("more_body", False) else 0
            self._cycle.expected_content_length = len(message.get("body", b"")) + rest
        await self._send(message)

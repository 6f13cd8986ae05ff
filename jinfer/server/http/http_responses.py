"""HTTP responses: JSON, and streams of server-sent events (SSE)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.types import Send

from jinfer.server.http.http_errors import (
    OPENAI_ERRORS,
    ApiError,
    ErrorFormat,
    RunsElsewhereError,
    as_api_error,
    cancel_reason,
    invalid_request,
)

JSON_MEDIA_TYPE = "application/json"
NDJSON_MEDIA_TYPE = "application/x-ndjson"
SSE_MEDIA_TYPE = "text/event-stream; charset=utf-8"
SSE_DONE = b"data: [DONE]\n\n"
SSE_PING = b": ping\n\n"


def dumps(value: Any) -> bytes:
    """Serialize to JSON; NaN and infinity become null."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def dumps_list(head: Mapping[str, Any], name: str, items: Iterable[Any]) -> bytes:
    """Serialize an object with a long list under a key, item by item.

    The GIL can be released between two items, unlike during a single long `dumps`.
    """
    text = b",".join([dumps(item) for item in items])
    return b"%s,%s:[%s]}" % (dumps(head)[:-1], dumps(name), text)


def sse_event(value: Any, name: str | None = None) -> bytes:
    """Format a server-sent event."""
    data = b"data: " + dumps(value) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


def batch_bytes(events: Sequence[bytes], batch: Sequence[Any] | None) -> bytes:
    """Join the events of a batch of `RequestRunner.chunks`; an empty batch becomes a ping."""
    return b"".join(events) or (SSE_PING if batch is not None and not batch else b"")


@dataclass(frozen=True)
class HttpResponse:
    """A response that is sent whole.

    Attributes:
        content: serialized to JSON, unless it is bytes.
    """

    content: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    media_type: str = JSON_MEDIA_TYPE

    async def send(self, send: Send, seconds: float, ping: float | None = None) -> None:
        """Send the response, within a time limit."""
        data = self.content if isinstance(self.content, bytes) else dumps(self.content)
        headers = {"content-type": self.media_type, "content-length": str(len(data))}
        if self.status == 304:  # Content-Length would have to be that of the omitted body
            del headers["content-length"]
        if self.status == 204:  # no content, so no type or length
            headers = {}
        start = _start(self.status, {**headers, **self.headers})
        async with asyncio.timeout(seconds):
            await send(start)
            await send({"type": "http.response.body", "body": data})


def error_response(error: ApiError, format: ErrorFormat = OPENAI_ERRORS) -> HttpResponse:
    """Create the response for an error."""
    return HttpResponse(format.body(error), format.status(error), error.headers)


def sse_error(error: ApiError) -> bytes:
    """Format an error in the middle of a stream as a server-sent event."""
    return sse_event(error.body())


@dataclass(frozen=True)
class StreamedResponse:
    """A streamed response.

    Attributes:
        pieces: bytes to send. The status is sent with the first, even if it is empty.
        failed: formats an error in the middle of the stream.
    """

    pieces: AsyncGenerator[bytes]
    media_type: str = SSE_MEDIA_TYPE
    failed: Callable[[ApiError], bytes] = sse_error

    async def send(
        self, send: Send, seconds: float, ping: float | None = None
    ) -> BaseException | None:
        """Send the pieces. Raise an error that occurs before the first piece.

        Args:
            seconds: time limit of a piece.
            ping: seconds without a first piece, while a model loads, after which a stream of events
                begins with a comment; None: it does not.

        Returns:
            The error in the middle of the stream that was sent to the client, if any.
        """
        begun = False
        failure: Exception | None = None
        headers = {
            "content-type": self.media_type,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        async with contextlib.aclosing(self.pieces) as pieces:
            try:
                async for piece in self._with_pings(pieces, ping):
                    async with asyncio.timeout(seconds):
                        if not begun:
                            begun = True
                            await send(_start(200, headers))
                        if piece:
                            await send(_part(piece, more=True))
            except TimeoutError:
                raise
            except asyncio.CancelledError as error:
                failure = cancel_reason(error)
                if not begun or failure is None:
                    raise
            except RunsElsewhereError as error:
                error.begun = begun
                raise
            except Exception as error:
                if not begun:
                    raise
                failure = error
            if failure is not None:
                await send(_part(self.failed(as_api_error(failure)), more=True))
        if not begun:
            await send(_start(200, headers))
        await send(_part(b"", more=False))
        return failure

    async def _with_pings(
        self, pieces: AsyncGenerator[bytes], ping: float | None
    ) -> AsyncGenerator[bytes]:
        if ping is None or self.media_type != SSE_MEDIA_TYPE:
            async for piece in pieces:
                yield piece
            return
        first = asyncio.ensure_future(anext(pieces, None))
        try:
            while not (await asyncio.wait({first}, timeout=ping))[0]:
                yield SSE_PING
        finally:
            if not first.done():
                first.cancel()
                await asyncio.wait({first})
        begin = first.result()
        if begin is not None:
            yield begin
            async for piece in pieces:
                yield piece


def _part(data: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _start(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    pairs = [(name.lower().encode("latin-1"), v.encode("latin-1")) for name, v in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


@dataclass
class EventLog:
    """Numbered events of an answer, which any number of readers follow.

    Attributes:
        max_bytes: size beyond which the oldest events are dropped; None: unlimited.
        completed: time of the end, in seconds since 1970.
        total, dropped: bytes so far, and of dropped events.
    """

    max_bytes: int | None = None
    completed: float | None = None
    total: int = 0
    dropped: int = 0
    _events: deque[bytes] = field(default_factory=deque)
    _first: int = 0  # number of the first kept event
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def count(self) -> int:
        """Number of events so far."""
        return self._first + len(self._events)

    def add(self, event: bytes) -> None:
        """Record an event, with its number."""
        known = b"id: %d\n" % self.count + event
        self._events.append(known)
        self.total += len(known)
        while self.max_bytes is not None and self.total - self.dropped > self.max_bytes:
            self.dropped += len(self._events.popleft())
            self._first += 1
        self.wake()

    def end(self) -> None:
        """End the log."""
        self.completed = time.time()
        self.wake()

    def wake(self) -> None:
        """Wake the readers."""
        self._more.set()
        self._more = asyncio.Event()

    async def wait(self) -> None:
        """Return at the next event, or at the end."""
        await self._more.wait()

    def place_of(self, offset: int) -> tuple[int, int]:
        """Return the number of the event that contains a byte, and the byte's offset in it.

        Raises:
            ApiError: the byte was dropped, or is beyond the end.
        """
        if not self.dropped <= offset <= self.total:
            raise invalid_request(
                f"bytes {self.dropped} to {self.total} are available; start there", "from"
            )
        at = self.dropped
        for number, event in enumerate(self._events, self._first):
            if offset < at + len(event):
                return number, offset - at
            at += len(event)
        return self.count, 0

    async def read(self, place: int, skip: int, ping: float) -> AsyncGenerator[bytes]:
        """Yield the events from a number on, with comments after `ping` seconds of silence.

        Args:
            place: number of the first event.
            skip: bytes of the first event to skip.
        """
        yield b""
        while True:
            place = max(place, self._first)
            if known := list(self._events)[place - self._first :]:
                place += len(known)
                yield b"".join(known)[skip:]
                skip = 0
            elif self.completed is not None:
                return
            else:
                try:
                    async with asyncio.timeout(ping):
                        await self.wait()
                except TimeoutError:
                    yield SSE_PING

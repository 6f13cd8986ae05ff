"""Resumable streams: streams of events that outlive their client and are read again (llama.cpp).

A request whose header X-Conversation-Id names a conversation is answered on whether or not its
client stays. Everything is bounded: streams, their bytes, and how long they are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jinfer.server.http.http_errors import (
    ApiError,
    RunsElsewhereError,
    as_api_error,
    cancel_reason,
    invalid_request,
)
from jinfer.server.http.http_responses import SSE_PING, StreamedResponse, StreamReaders

HEADER = "x-conversation-id"
MAX_ID = 512  # characters
MAX_RUNNING = 64
MAX_BYTES = 4 << 20  # of one stream; the oldest events go first
_MAX_ENDED_BYTES = 64 << 20  # of all that have ended
_SECONDS = 600.0  # that one is kept after its end
_MOST_ELSEWHERE = 1024


@dataclass
class ResumableStream:
    """The events of one answer.

    Attributes:
        id: the conversation's.
        started, completed: times, in seconds since 1970.
        total: bytes that there were.
        dropped: bytes of the oldest events, which are kept no longer.
        begun: whether it was not refused.
    """

    id: str
    started: float = field(default_factory=time.time)
    completed: float | None = None
    total: int = 0
    dropped: int = 0
    begun: bool = False
    _events: deque[bytes] = field(default_factory=deque)
    _first: int = 0  # number of the first event that is kept
    _refusal: Exception | None = None
    _readers: StreamReaders = field(default_factory=StreamReaders)

    def append(self, piece: bytes) -> None:
        """Record whole events, each under its number."""
        self.begun = True
        if piece != SSE_PING:
            for event in piece.split(b"\n\n")[:-1]:
                known = b"id: %d\n%s\n\n" % (self._first + len(self._events), event)
                self._events.append(known)
                self.total += len(known)
        while self.total - self.dropped > MAX_BYTES:
            self.dropped += len(self._events.popleft())
            self._first += 1
        self._readers.wake()

    def close(self, refusal: Exception | None = None) -> None:
        """Nothing more comes; or it was refused, or cancelled, before anything came."""
        self._refusal = None if self.begun else refusal
        self.completed = time.time()
        self._readers.wake()

    def place_of(self, offset: int) -> tuple[int, int]:
        """The event that a byte belongs to, and how many of its bytes are before it.

        Raises:
            ApiError: it is kept no longer, or is not there.
        """
        if not self.dropped <= offset <= self.total:
            raise invalid_request(
                f"bytes {self.dropped} to {self.total} are kept; begin there", "from"
            )
        at = self.dropped
        for number, event in enumerate(self._events, self._first):
            if offset < at + len(event):
                return number, offset - at
            at += len(event)
        return self._first + len(self._events), 0

    async def read(self, place: int, skip: int, ping: float) -> AsyncGenerator[bytes]:
        """The events from one on, as they come; a comment after some seconds of silence.

        Args:
            place: number of the first event.
            skip: bytes of it that are left out.

        Raises:
            Exception: the request was refused before the first event.
        """
        while not self.begun and self.completed is None:
            await self._readers.wait()
        if self._refusal is not None:
            raise self._refusal
        yield b""
        while True:
            place = max(place, self._first)
            known = list(self._events)[place - self._first :]
            if known:
                place += len(known)
                yield b"".join(known)[skip:]
                skip = 0
            elif self.completed is not None:
                return
            elif comment := await self._readers.wait_or_ping(ping):
                yield comment


@dataclass
class ResumableStreams:
    """The streams that can be resumed.

    Attributes:
        streams: by the conversation's id, the oldest first.
    """

    streams: dict[str, ResumableStream] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _elsewhere: dict[str, Any] = field(default_factory=dict)  # id -> model with a process

    async def start(
        self, id: str, reply: StreamedResponse, ping: float, answers: set[asyncio.Future[None]]
    ) -> StreamedResponse:
        """Answer on as a stream that can be resumed, instead of the conversation's last one.

        Args:
            ping: seconds of silence until a comment.
            answers: the server's requests in progress, of which it is one.

        Raises:
            ApiError: the id is not plain, or too many run.
        """
        if not id.isprintable() or len(id) > MAX_ID:
            raise invalid_request(f"X-Conversation-Id has at most {MAX_ID} printable characters")
        await self.stop(id)
        self._remove_old()
        if len(self._tasks) >= MAX_RUNNING:
            message = f"{MAX_RUNNING} streams that can be resumed run already; try again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        stream = self.streams[id] = ResumableStream(id)
        task = asyncio.ensure_future(self._run(stream, reply.pieces, reply.failed))
        self._tasks[id] = task
        answers.add(task)
        task.add_done_callback(answers.discard)
        task.add_done_callback(partial(_closed, stream))
        return StreamedResponse(stream.read(0, 0, ping), reply.media_type, reply.failed)

    async def _run(
        self,
        stream: ResumableStream,
        pieces: AsyncGenerator[bytes],
        failed: Callable[[ApiError], bytes],
    ) -> None:
        refusal: Exception | None = None
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    stream.append(piece)
        except RunsElsewhereError as error:
            refusal = error
            self._elsewhere[stream.id] = error.model
            while len(self._elsewhere) > _MOST_ELSEWHERE:
                del self._elsewhere[next(iter(self._elsewhere))]
        except asyncio.CancelledError as cancelled:
            refusal = cancel_reason(cancelled) or _stopped()
        except Exception as error:
            refusal = error
        if refusal is not None and stream.begun:
            stream.append(failed(as_api_error(refusal)))
        stream.close(refusal)
        if self._tasks.get(stream.id) is asyncio.current_task():
            del self._tasks[stream.id]
            if not stream.begun:
                self.streams.pop(stream.id, None)

    async def stop(self, id: str) -> None:
        """End a stream, if it still comes, and forgets it."""
        self.streams.pop(id, None)
        self._elsewhere.pop(id, None)
        if (task := self._tasks.pop(id, None)) is not None:
            task.cancel(_stopped())
            await asyncio.wait({task})

    def find(self, id: str) -> ResumableStream:
        """The stream of a conversation.

        Raises:
            ApiError: there is none.
            RunsElsewhereError: its model's process has it.
        """
        self._remove_old()
        if (stream := self.streams.get(id)) is not None:
            return stream
        self.forward(id)
        raise ApiError(404, f"there is no stream of the conversation {id[:80]!r}", param="conv_id")

    def forward(self, id: str) -> None:
        """Leave a request to the process that has the stream, if another one has.

        Raises:
            RunsElsewhereError: it has.
        """
        if id in self._elsewhere:
            raise RunsElsewhereError(self._elsewhere[id], awake=False)

    def _remove_old(self) -> None:
        for id in list(self._too_many()):
            del self.streams[id]

    def _too_many(self) -> Iterator[str]:
        """Those that ended long ago, and the oldest ones as long as all are too large."""
        ended = [stream for stream in self.streams.values() if stream.completed is not None]
        size = sum(stream.total - stream.dropped for stream in ended)
        for stream in ended:
            assert stream.completed is not None, "it has ended"
            if stream.completed < time.time() - _SECONDS or size > _MAX_ENDED_BYTES:
                size -= stream.total - stream.dropped
                yield stream.id


def _stopped() -> ApiError:
    return ApiError(400, "the stream was cancelled", code="cancelled")


def _closed(stream: ResumableStream, task: asyncio.Task[None]) -> None:
    """Close a stream whose task was cancelled before it began to run."""
    if stream.completed is None:
        stream.close(_stopped())

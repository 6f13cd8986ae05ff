"""Resumable streams: event streams that outlive their client and can be read again (llama.cpp).

A request with the header X-Conversation-Id is answered to the end even if its client disconnects.
The number, size and age of streams are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
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
from jinfer.server.http.http_responses import SSE_PING, EventLog, StreamedResponse

HEADER = "x-conversation-id"
MAX_ID = 512  # characters
MAX_RUNNING = 64
MAX_BYTES = 4 << 20  # of a stream; the oldest events are dropped first
_MAX_ENDED_BYTES = 64 << 20  # of all ended streams
_SECONDS = 600.0  # seconds that a stream is kept after its end
_MOST_ELSEWHERE = 1024


@dataclass(kw_only=True)
class ResumableStream(EventLog):
    """The events of an answer.

    Attributes:
        id: id of the conversation.
        started: time of the start, in seconds since 1970.
        begun: whether the answer has begun.
    """

    id: str
    max_bytes: int | None = MAX_BYTES
    started: float = field(default_factory=time.time)
    begun: bool = False
    _refusal: Exception | None = None

    def append(self, piece: bytes) -> None:
        """Record complete events."""
        self.begun = True
        for event in () if piece == SSE_PING else piece.split(b"\n\n")[:-1]:
            self.add(event + b"\n\n")
        self.wake()  # even an empty piece begins the answer

    def close(self, refusal: Exception | None = None) -> None:
        """End the stream, with an error if it was refused or cancelled before it began."""
        self._refusal = None if self.begun else refusal
        self.end()

    async def read(self, place: int, skip: int, ping: float) -> AsyncGenerator[bytes]:
        """Yield events as `EventLog.read`; raise the error of a refused request."""
        while not self.begun and self.completed is None:
            await self.wait()
        if self._refusal is not None:
            raise self._refusal
        async for piece in super().read(place, skip, ping):
            yield piece


@dataclass
class ResumableStreams:
    """All resumable streams.

    Attributes:
        streams: streams by conversation id, oldest first.
    """

    streams: dict[str, ResumableStream] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _elsewhere: dict[str, Any] = field(
        default_factory=dict
    )  # conversation id -> model with its own process

    async def start(
        self, id: str, reply: StreamedResponse, ping: float, answers: set[asyncio.Future[None]]
    ) -> StreamedResponse:
        """Start a resumable stream, replacing the conversation's last stream.

        Args:
            ping: seconds of silence until a comment.
            answers: the server's requests in progress, to which it is added.

        Raises:
            ApiError: an invalid id, or too many running streams.
        """
        if not id.isprintable() or len(id) > MAX_ID:
            raise invalid_request(f"X-Conversation-Id has at most {MAX_ID} printable characters")
        await self.stop(id)
        self._remove_old()
        if len(self._tasks) >= MAX_RUNNING:
            message = f"{MAX_RUNNING} resumable streams are running; try again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        stream = self.streams[id] = ResumableStream(id=id)
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
        """Stop and remove a stream."""
        self.streams.pop(id, None)
        self._elsewhere.pop(id, None)
        if (task := self._tasks.pop(id, None)) is not None:
            task.cancel(_stopped())
            await asyncio.wait({task})

    def find(self, id: str) -> ResumableStream:
        """Return the stream of a conversation.

        Raises:
            ApiError: there is no such stream.
            RunsElsewhereError: the model's own process has the stream.
        """
        self._remove_old()
        if (stream := self.streams.get(id)) is not None:
            return stream
        self.forward(id)
        raise ApiError(404, f"there is no stream of the conversation {id[:80]!r}", param="conv_id")

    def forward(self, id: str) -> None:
        """Forward a request if another process has the stream.

        Raises:
            RunsElsewhereError: another process has the stream.
        """
        if id in self._elsewhere:
            raise RunsElsewhereError(self._elsewhere[id], awake=False)

    def _remove_old(self) -> None:
        for id in list(self._too_many()):
            del self.streams[id]

    def _too_many(self) -> Iterator[str]:
        """Yield the ids of expired streams, and of the oldest streams beyond the size limit."""
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

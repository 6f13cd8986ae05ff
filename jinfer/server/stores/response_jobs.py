"""Background responses: answers of /v1/responses that run without a waiting client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from jinfer.server.http.http_errors import ApiError, as_api_error, cancel_reason, shutting_down
from jinfer.server.http.http_responses import StreamReaders, sse_event
from jinfer.server.stores.response_store import ResponseStore, StoredResponse

_log = logging.getLogger("jinfer.server")
MAX_RUNNING = 256  # answers in the background
_MAX_ENDED = 64  # finished responses whose events are kept


@dataclass
class ResponseJob:
    """A background response.

    Attributes:
        id: id of the response.
        response: the current response object.
        input: the input items.
        ended: whether all events were recorded.
    """

    id: str
    response: dict[str, Any]
    input: list[dict[str, Any]]
    ended: bool = False
    _events: list[bytes] = field(default_factory=list)
    _readers: StreamReaders = field(default_factory=StreamReaders)

    def add(self, events: list[dict[str, Any]]) -> None:
        """Record events, and the response of the last event."""
        for event in events:
            number = b"id: %d\n" % len(self._events)
            self._events.append(number + sse_event(event, event["type"]))
            self.response = event.get("response", self.response)
        self._readers.wake()

    def end(self, status: str, error: ApiError | None = None) -> None:
        """End an unfinished answer."""
        shown = error and {"code": error.code or "server_error", "message": error.message}
        response = {**self.response, "status": status, "error": shown}
        event = {"type": f"response.{status}", "response": response}
        self.add([{**event, "sequence_number": len(self._events)}])

    def close(self) -> None:
        """End the events."""
        self.ended = True
        self._readers.wake()

    async def events(self, after: int, ping: float) -> AsyncGenerator[bytes]:
        """Yield the events after a number.

        Args:
            ping: seconds of silence until a comment.
        """
        place = after + 1
        yield b""
        while True:
            if place < len(self._events):
                known, place = self._events[place:], len(self._events)
                yield b"".join(known)
            elif self.ended:
                return
            elif comment := await self._readers.wait_or_ping(ping):
                yield comment


@dataclass
class ResponseJobs:
    """All background responses.

    Attributes:
        store: store of the responses.
        jobs: running and recently finished jobs by id, oldest first.
    """

    store: ResponseStore
    jobs: dict[str, ResponseJob] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def start(
        self, job: ResponseJob, batches: Any, answers: set[asyncio.Future[None]]
    ) -> None:
        """Start an answer; return when the engine has accepted the request.

        Args:
            batches: batches of events; the last event has the stored response.
            answers: the server's requests in progress, to which it is added.

        Raises:
            ApiError: the request was refused, or too many responses are running.
        """
        if len(self._tasks) >= MAX_RUNNING:
            message = f"{MAX_RUNNING} background responses are running; try again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        await asyncio.to_thread(self.store.put, StoredResponse(job.response, job.input))
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._run(job, batches, taken))
        self._tasks[job.id], self.jobs[job.id] = task, job
        answers.add(task)
        task.add_done_callback(answers.discard)
        for item in [job for job in self.jobs.values() if job.ended][:-_MAX_ENDED]:
            del self.jobs[item.id]
        await taken

    async def _run(self, job: ResponseJob, batches: Any, taken: asyncio.Future[None]) -> None:
        whole = refused = False
        try:
            async with contextlib.aclosing(batches):
                async for events, _ in batches:
                    job.add(events)
                    if not taken.done():
                        taken.set_result(None)
            whole = True
        except asyncio.CancelledError as cancelled:
            reason = cancel_reason(cancelled)
            job.end("cancelled" if reason is None else "failed", reason)
        except Exception as error:
            refused = not taken.done()
            if refused:
                taken.set_exception(error)
            else:
                _log.error("a background response failed", exc_info=error)
                job.end("failed", as_api_error(error))
        finally:
            if not taken.done():
                taken.set_result(None)
            del self._tasks[job.id]
            job.close()
        if refused:
            self.jobs.pop(job.id, None)
            await asyncio.to_thread(self.store.delete, job.id)
        elif not whole:
            await asyncio.to_thread(self.store.put, StoredResponse(job.response, job.input))

    def running(self, id: str) -> ResponseJob | None:
        """Return a running answer."""
        return self.jobs[id] if id in self._tasks else None

    async def cancel(self, id: str, reason: ApiError | None = None) -> None:
        """Cancel an answer, if it is running.

        Args:
            reason: why it failed; None: cancelled by a client.
        """
        if (task := self._tasks.get(id)) is not None:
            task.cancel(reason)
            await asyncio.wait({task})

    async def close(self) -> None:
        """Cancel all answers, at shutdown."""
        for id in list(self._tasks):
            await self.cancel(id, shutting_down())

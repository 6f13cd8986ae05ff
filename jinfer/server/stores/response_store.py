"""Response store: answers of /v1/responses with their conversations, in memory or in a folder.

Bounded by number, bytes and age: the oldest are removed first. A record has the whole conversation
up to its answer, so that it can be continued without earlier records.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from jinfer.server.http.http_errors import ApiError, as_api_error, cancel_reason, shutting_down
from jinfer.server.http.http_responses import EventLog, dumps, sse_event

_ID = re.compile(r"resp_[0-9a-f]{32}")
UNFINISHED = ("queued", "in_progress")


@dataclass(frozen=True)
class StoredResponse:
    """A stored answer.

    Attributes:
        response: the response object.
        input: input items, including those of earlier responses.
    """

    response: dict[str, Any]
    input: list[dict[str, Any]]

    def conversation(self) -> list[dict[str, Any]]:
        """Return all items, including those of the answer."""
        return [*self.input, *self.response["output"]]


@dataclass
class ResponseStore:
    """Stored responses. Thread-safe; slow, as it reads and writes JSON: call it in a thread.

    Attributes:
        folder: folder of the responses; None: in memory.
        max_responses: maximum number of responses; 0: no storage.
        max_bytes: maximum total size.
        seconds: age at which a response is removed.
    """

    folder: Path | None = None
    max_responses: int = 1000
    max_bytes: int = 64 << 20
    seconds: float = 30 * 86400.0
    _known: dict[str, tuple[float, int]] = field(default_factory=dict)  # oldest first
    _bytes: int = 0
    _data: dict[str, bytes] = field(default_factory=dict)
    _items: dict[str, str] = field(default_factory=dict)  # output item -> its response
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        """Raise `OSError` if the folder cannot be used."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in self.folder.glob("*.tmp"):
            path.unlink(missing_ok=True)
        found = []
        for path in self.folder.glob("resp_*.json"):
            with contextlib.suppress(FileNotFoundError):
                if _ID.fullmatch(path.stem):
                    found.append((path.stat().st_mtime, path.stat().st_size, path.stem))
        for created, size, id in sorted(found):
            self._known[id] = created, size
            self._bytes += size
        self._remove_old()

    def put(self, stored: StoredResponse) -> None:
        """Store a response, replacing its earlier state."""
        id, data = (
            stored.response["id"],
            dumps({"response": stored.response, "input": stored.input}),
        )
        with self._lock:
            created, size = self._known.get(id, (time.time(), 0))
            if self.folder is None:
                self._data[id] = data
            else:
                whole = self._path(id).with_suffix(".tmp")
                whole.write_bytes(data)
                os.replace(whole, self._path(id))
            self._bytes += len(data) - size
            self._known[id] = created, len(data)
            self._items |= {item["id"]: id for item in stored.response["output"] if "id" in item}
            self._remove_old()

    def get(self, id: str) -> StoredResponse | None:
        """Return a response by its id; None if it is missing or unreadable."""
        with self._lock:
            self._remove_old()
            if id not in self._known:
                return None
            try:
                data = self._data[id] if self.folder is None else self._path(id).read_bytes()
                kept = orjson.loads(data)
                return StoredResponse(kept["response"], kept["input"])
            except (OSError, ValueError, KeyError, TypeError):
                self.delete(id)
                return None

    def item(self, id: str) -> dict[str, Any] | None:
        """Return an output item of a response stored since the start; None if missing."""
        found = self.get(self._items.get(id, ""))
        items = [] if found is None else found.response["output"]
        return next((item for item in items if item.get("id") == id), None)

    def delete(self, id: str) -> bool:
        """Remove a response; return whether it existed."""
        with self._lock:
            known = self._known.pop(id, None)
            if known is None:
                return False
            self._bytes -= known[1]
            self._data.pop(id, None)
            self._items = {item: of for item, of in self._items.items() if of != id}
            if self.folder is not None:
                self._path(id).unlink(missing_ok=True)
            return True

    def _path(self, id: str) -> Path:
        assert self.folder is not None, "there is a folder"
        return self.folder / f"{id}.json"

    def _remove_old(self) -> None:
        for id in list(self._too_many()):
            self.delete(id)

    def _too_many(self) -> Iterator[str]:
        """Yield the oldest responses beyond the limits of number, size and age."""
        oldest, left, size = time.time() - self.seconds, len(self._known), self._bytes
        for id, (created, length) in self._known.items():
            if left <= self.max_responses and size <= self.max_bytes and created >= oldest:
                return
            yield id
            left, size = left - 1, size - length


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
        log: the events.
    """

    id: str
    response: dict[str, Any]
    input: list[dict[str, Any]]
    log: EventLog = field(default_factory=EventLog)

    def add(self, events: list[dict[str, Any]]) -> None:
        """Record events, and the response of the last event."""
        for event in events:
            self.log.add(sse_event(event, event["type"]))
            self.response = event.get("response", self.response)

    def end(self, status: str, error: ApiError | None = None) -> None:
        """End an unfinished answer."""
        shown = error and {"code": error.code or "server_error", "message": error.message}
        response = {**self.response, "status": status, "error": shown}
        event = {"type": f"response.{status}", "response": response}
        self.add([{**event, "sequence_number": self.log.count}])


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
        for item in [job for job in self.jobs.values() if job.log.completed][:-_MAX_ENDED]:
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
            job.log.end()
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

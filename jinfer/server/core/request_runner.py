"""Request runner: submits a request's prompts to the engine and collects its output in asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jinfer.api.session import Session
from jinfer.engine.output.completion import Chunk, Completion, Usage, best_of, completion
from jinfer.engine.requests import DeadlineError, RequestError
from jinfer.sampling.request_errors import ConstraintError
from jinfer.server.core.prompt_requests import PromptRequests, field_of_error
from jinfer.server.http.http_errors import ApiError, as_api_error
from jinfer.server.http.metrics import RequestTimer

# Seconds after its deadline until a request is abandoned here, in case the engine, waiting for
# another process, has not ended it.
_GRACE = 1.0
_PROGRESS_SECONDS = 0.25  # between two prefill progress events

type ChunkBatch = list[tuple[int, Chunk]] | None  # with the indices of answers; see `chunks`


@dataclass
class RequestRunner:
    """Runs the answers to prompts and yields their chunks.

    Attributes:
        session: the engine session.
        jobs: the prompts.
        max_running: number of answers computed at a time.
        ping: seconds of silence after which an empty list is yielded.
        timer: measures latencies.
        usages: usage of each complete answer.
        prepared: the engine requests of all answers.
        owners: index of each answer's prompt.
    """

    session: Session
    jobs: Sequence[PromptRequests]
    timer: RequestTimer
    max_running: int
    ping: float
    usages: dict[int, Usage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prepared = [prepared for job in self.jobs for prepared in job.engine_requests]
        self.owners = [number for number, job in enumerate(self.jobs) for _ in job.engine_requests]
        self._announced: set[int] = set()
        self._shown: Counter[int] = Counter()
        self._cached: dict[int, int] = {}
        if any(job.options.progress for job in self.jobs):
            self.ping = min(self.ping, _PROGRESS_SECONDS)

    def job(self, index: int) -> PromptRequests:
        """Return the prompt of an answer."""
        return self.jobs[self.owners[index]]

    async def chunks(self) -> AsyncGenerator[ChunkBatch]:
        """Yield lists of (answer index, chunk); `usages` is complete at the end.

        None is yielded once, when the engine has accepted the requests: from then on an answer is
        not refused. An empty list means silence for `ping` seconds. Closing the iterator
        cancels unfinished answers.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        waiting = iter(enumerate(self.prepared))
        running: set[int] = set()

        def sink(index: int) -> Callable[[Any], None]:
            def put(piece: Any) -> None:
                # On the engine's thread, which forgets the request when it ends.
                if index >= 0 and index not in self._cached and (known := self._progress(index)):
                    self._cached[index] = known[0]
                with contextlib.suppress(RuntimeError):  # the event loop was closed meanwhile
                    loop.call_soon_threadsafe(queue.put_nowait, (index, piece))

            return put

        def start() -> None:
            while (
                len(running) < self.max_running and (following := next(waiting, None)) is not None
            ):
                index, prepared = following
                self.session.submit(prepared, sink(index))
                self.timer.begin(index)
                running.add(index)

        try:
            start()
            self.session.thread.when_received(partial(sink(-1), None))
            while running:
                left = self._seconds_left(running)
                if left < 0 and queue.empty():
                    raise self._too_late(running)
                items = await _ready(queue, max(0.0, min(left, self.ping)))
                batch, accepted, failure = self._read(items, running)
                if failure is not None:
                    if batch:  # chunks that came before the error
                        yield batch
                    raise failure
                if accepted:
                    yield None
                start()
                if batch or (running and not accepted):
                    yield batch
        finally:
            for index in running:
                self.timer.abort(index)
                with contextlib.suppress(RequestError):  # the model was closed
                    self.session.thread.cancel(self.prepared[index].request.id)

    def _read(
        self, items: Iterable[tuple[int, Any]], running: set[int]
    ) -> tuple[list[tuple[int, Chunk]], bool, BaseException | None]:
        """Read items of the queue, up to an error.

        Returns:
            The chunks, whether the engine has accepted the requests, and the error.
        """
        batch: list[tuple[int, Chunk]] = []
        accepted = False
        for index, piece in items:
            if piece is None:
                accepted = True
                continue
            options = self.job(index).options
            if isinstance(piece, BaseException):
                running.discard(index)
                return batch, accepted, self._failure(index, piece)
            # With max_tokens 0, the engine still samples a token.
            if isinstance(piece, Usage):
                running.discard(index)
                self.usages[index] = _without_token(piece) if options.nothing else piece
                self.timer.end(index, self.usages[index])
                continue
            if options.nothing:
                piece = Chunk("", finish_reason=piece.finish_reason and "length")
            self.timer.chunk(index, piece)
            batch.append((index, piece))
        return batch, accepted, None

    def _failure(self, index: int, error: BaseException) -> BaseException:
        """Return the error of an answer, with its request field."""
        if isinstance(error, DeadlineError):
            return self._too_late([index])
        if isinstance(error, ConstraintError):
            return as_api_error(error, param=field_of_error(error, self.job(index).options))
        return error

    def _too_late(self, indices: Iterable[int]) -> Exception:
        """Return the error of answers that missed the request's deadline, or the server's."""
        if any(self.job(index).options.seconds is not None for index in indices):
            name = "t_max_predict_ms"
            message = f"the answer was not complete within {name}"
            return ApiError(408, message, param=name, code="deadline_exceeded")
        return DeadlineError("the request's deadline has passed")

    def _seconds_left(self, running: Iterable[int]) -> float:
        """Return the seconds until the first running answer is abandoned."""
        deadlines = (self.prepared[index].request.deadline for index in running)
        end = min((deadline for deadline in deadlines if deadline is not None), default=math.inf)
        return end + _GRACE - time.monotonic()

    def mark_shown(self, index: int, chunk: Chunk) -> None:
        """Record a chunk as shown; the engine may deliver several at once."""
        self._shown[index] += len(chunk.token_ids)

    def shown_usage(self, index: int) -> Usage:
        """Return the usage and times of an unfinished answer, up to the last shown chunk."""
        prefill, decode = self.timer.seconds(index)
        request = self.prepared[index].request
        cached = self._cached.get(index)
        if cached is None:  # before its first chunk
            cached, _ = self._progress(index) or (0, 0)
        usage = Usage(len(request.prompt), self._shown[index], prefill, decode, cached)
        return _without_token(usage) if self.job(index).options.nothing else usage

    def progress(self, *, first: bool = False) -> list[tuple[int, dict[str, Any]]]:
        """Return the prefill progress of each prompt without tokens yet, in llama.cpp's format.

        The first event of a prompt has its number of cached tokens.

        Args:
            first: return first events only, even if the answers have begun.
        """
        result = []
        for index, prepared in enumerate(self.prepared):
            new = index not in self._announced
            if not new and (first or self.timer.counts.get(index)):
                continue
            known = self._progress(index)
            if known is None:
                continue
            self._announced.add(index)
            cached, done = known
            total = len(prepared.request.prompt)
            figures = {
                "total": total,
                "cache": cached,
                "processed": cached if new else min(done, total),
                "time_ms": round(self.timer.seconds(index)[0] * 1000),
            }
            result.append((index, figures))
        return result

    def _progress(self, index: int) -> tuple[int, int] | None:
        return self.session.thread.progress(self.prepared[index].request.id)

    def summary(self) -> dict[str, Any]:
        """Return fields for the access log."""
        return {
            "prompt_tokens": sum(len(job.ids) for job in self.jobs),
            "completion_tokens": sum(self.timer.counts.values()),
            "finish_reason": ",".join(dict.fromkeys(self.timer.reasons.values())),
        }

    async def completions(self) -> list[list[Completion]]:
        """Return the complete answers to each prompt; with `best_of` the best of them."""
        chunks: list[list[Chunk]] = [[] for _ in self.prepared]
        async with contextlib.aclosing(self.chunks()) as pieces:
            async for batch in pieces:
                for index, chunk in batch or ():
                    chunks[index].append(chunk)
        whole = iter(
            [completion(answer_chunks, self.usages[i]) for i, answer_chunks in enumerate(chunks)]
        )
        return [
            best_of([next(whole) for _ in job.engine_requests], job.options.params)
            for job in self.jobs
        ]


def _without_token(usage: Usage) -> Usage:
    return replace(usage, completion_tokens=0, decode_seconds=0.0)


async def _ready(queue: asyncio.Queue[Any], ping: float) -> Iterator[Any]:
    """Wait for items in the queue; return all of them, or nothing after `ping` seconds."""
    try:
        async with asyncio.timeout(ping):
            found = [await queue.get()]
    except TimeoutError:
        return iter(())
    while not queue.empty():
        found.append(queue.get_nowait())
    return iter(found)

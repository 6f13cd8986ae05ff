"""Service: the state that all routes share, and the context of one request."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

from pydantic import BaseModel
from starlette.requests import Request

from jinfer.engine.requests import DeadlineError
from jinfer.server.core.prompt_requests import PromptRequests, check_captured_bytes
from jinfer.server.core.request_activations import check_inspection
from jinfer.server.core.request_runner import ChunkBatch, RequestRunner
from jinfer.server.http import request_body
from jinfer.server.http.client_shares import Shares
from jinfer.server.http.http_errors import (
    ApiError,
    invalid_request,
    shutting_down,
    unsupported_field,
)
from jinfer.server.http.metrics import Metrics, RequestTimer
from jinfer.server.http.request_body import UnfinishedBody
from jinfer.server.http.server_settings import ServerSettings
from jinfer.server.models.model_manager import ModelManager
from jinfer.server.models.served_model import ServedModel
from jinfer.server.stores.batch_store import BatchStore
from jinfer.server.stores.file_store import FileStore
from jinfer.server.stores.response_store import ResponseJobs, ResponseStore
from jinfer.server.stores.resumable_streams import ResumableStreams

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"(-?)((?:{_PART.pattern})+)")
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?")


def keep_alive_seconds(value: str | float) -> float:
    """Convert a `keep_alive` to seconds: a number, or "5m", "1h30m"; negative: infinity.

    Raises:
        ApiError: neither a number nor a duration.
    """
    seconds = _seconds(value)
    if seconds is None or math.isnan(seconds):
        message = (
            f"{str(value)[:80]!r} is not a number of seconds, nor a duration such as 5m or 1h30m"
        )
        raise invalid_request(message, "keep_alive")
    return math.inf if seconds < 0 else seconds


def _seconds(value: str | float) -> float | None:
    if not isinstance(value, str):
        return float(value)
    if _NUMBER.fullmatch(value):
        return float(value)
    if (found := _DURATION.fullmatch(value)) is None:
        return None
    total = sum(float(count) * _UNITS[unit] for count, unit in _PART.findall(found[2]))
    return -1.0 if found[1] and total else total


_BODIES = 32  # bodies of the largest size that fit into memory while they are read
# Fields that may need a grammar to be compiled.
_GRAMMARS = frozenset(
    {
        *("json_schema", "regex", "choice", "grammar", "structured_outputs"),
        *("response_format", "format", "text", "tool_choice", "output_config", "output_format"),
    }
)


@dataclass(frozen=True)
class Service:
    """A running server.

    Attributes:
        settings: its options.
        models: its models.
        metrics: its metrics.
        answers: the requests in progress.
        responses: the stored responses.
        files, batches: stores in the folder of `--files-dir`; None without that flag.
        streams: the streams that can be resumed.
    """

    settings: ServerSettings
    models: ModelManager
    metrics: Metrics
    answers: set[asyncio.Future[None]] = field(default_factory=set)
    responses: ResponseStore = field(default_factory=ResponseStore)
    files: FileStore | None = None
    batches: BatchStore | None = None
    streams: ResumableStreams = field(default_factory=ResumableStreams)

    @cached_property
    def bodies(self) -> Shares[UnfinishedBody]:
        """Bytes of the bodies that are being read."""
        return Shares(_BODIES * self.settings.max_body)

    @cached_property
    def response_jobs(self) -> ResponseJobs:
        """The background responses."""
        return ResponseJobs(self.responses)

    def cancel_answers(self, reason: ApiError | None = None) -> None:
        """Cancel all requests; clients receive the reason, by default a shutdown."""
        for task in self.answers:
            task.cancel(reason or shutting_down(self.settings.retry_after))

    async def in_thread[T](self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function in a worker thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.models.workers, partial(work, *args, **kwargs))

    async def in_engine_thread[T](self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function that waits for the engine, in a worker thread.

        Raises:
            DeadlineError: the time limit of an answer has passed.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.settings.timeout):
                task = partial(work, *args, **kwargs)
                return await loop.run_in_executor(self.models.waiters, task)
        except TimeoutError:
            raise DeadlineError("the request's deadline has passed") from None


@dataclass(frozen=True)
class RequestContext[B: BaseModel]:
    """The context of one request.

    Attributes:
        service: the server.
        body: the parsed body.
        http: Starlette's request, with its headers.
        id: the request id, from the client or generated.
        notes: fields for the access log.
    """

    service: Service
    body: B
    http: Request
    id: str
    notes: dict[str, Any] = field(default_factory=dict)

    def note(self, **known: Any) -> None:
        """Add fields to the access log."""
        self.notes.update({name: value for name, value in known.items() if value is not None})

    def ignore(self, field: str, why: str) -> None:
        """Report a field without effect to the client and the log.

        Raises:
            ApiError: the server is strict.
        """
        if self.service.settings.strict:
            raise unsupported_field(why, field)
        request_body.note_ignored(self.notes, field)

    def keep_alive(self) -> float | None:
        """Return the seconds that the model stays in memory after this request; None: not set.

        Raises:
            ApiError: an invalid duration; or the server is strict, and its models stay in memory.
        """
        value = getattr(self.body, "keep_alive", None)
        if value is None:
            return None
        seconds = keep_alive_seconds(value)
        if self.service.models.is_dynamic:
            return seconds
        self.ignore("keep_alive", "the server's models stay in memory; see --models-dir")
        return None

    @contextlib.asynccontextmanager
    async def running(self, prepare: Prepare) -> AsyncIterator[tuple[ServedModel, RequestRunner]]:
        """Run the request on its model, which stays loaded meanwhile.

        Args:
            prepare: tokenizes and validates the prompts; called in a worker thread.
        """
        models, body = self.service.models, cast("Any", self.body)
        check_inspection(body, self.service.settings)
        async with models.use(body.model, keep=self.keep_alive()) as model:
            self.note(model=model.name)
            model.session.processors.by_name = self.service.settings.logits_processors
            # Requests with a grammar have a pool of their own, so that slow grammars do not delay
            # other requests.
            grammar = not _GRAMMARS.isdisjoint(body.model_fields_set)
            pool = models.compilers if grammar else models.workers
            loop = asyncio.get_running_loop()
            jobs = await loop.run_in_executor(pool, prepare, self, model)
            check_captured_bytes(jobs, self.service.settings.inspection_bytes)
            timer = RequestTimer(self.service.metrics, model.name)
            max_running = 2 * model.session.engine.scheduler.slots
            run = RequestRunner(model.session, jobs, timer, max_running, self.service.settings.ping)
            try:
                yield model, run
            finally:
                self.note(**run.summary())

    @contextlib.asynccontextmanager
    async def streaming(
        self, prepare: Prepare
    ) -> AsyncIterator[tuple[ServedModel, RequestRunner, AsyncIterator[ChunkBatch]]]:
        """As `running`, with the batches of chunks as they come."""
        async with (
            self.running(prepare) as (model, run),
            contextlib.aclosing(run.chunks()) as batches,
        ):
            yield model, run, batches


type Prepare = Callable[[RequestContext[Any], ServedModel], Sequence[PromptRequests]]
type Handler = Callable[[Any], Awaitable[Any]]

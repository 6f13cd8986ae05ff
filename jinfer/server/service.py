"""What all routes share, and what a route is given of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from jinfer.engine.requests import DeadlineError
from jinfer.server import ignored_fields
from jinfer.server.http_errors import ApiError, closing, unsupported
from jinfer.server.metrics import Metrics, Watch
from jinfer.server.model_manager import Hosted, Models
from jinfer.server.request_runner import Job, Run
from jinfer.server.server_settings import Settings

# Fields that an answer's grammar may come of.
_GRAMMARS = frozenset(
    {
        *("json_schema", "regex", "choice", "grammar", "structured_outputs"),
        *("response_format", "text", "tool_choice"),
    }
)


@dataclass(frozen=True)
class Service:
    """A service that runs.

    Attributes:
        settings: what its operator decided.
        models: what it serves.
        metrics: what it has done.
        answers: that are on their way.
    """

    settings: Settings
    models: Models
    metrics: Metrics
    answers: set[asyncio.Future[None]] = field(default_factory=set)

    def end_answers(self, reason: ApiError | None = None) -> None:
        """Ends all answers; their clients are told why: the service closes, or what is given."""
        for one in self.answers:
            one.cancel(reason or closing(self.settings.retry_after))

    def run(self, hosted: Hosted, jobs: Sequence[Job]) -> Run:
        """The answers to some prompts, which one request may have twice as many of as slots."""
        most = 2 * hosted.frontend.engine.scheduler.slots
        watch = Watch(self.metrics, hosted.name)
        return Run(hosted.frontend, jobs, watch, most, self.settings.ping)

    async def beside[T](self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The result of what takes its time, done beside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.models.workers, partial(work, *args, **kwargs))

    async def prepared[T](self, body: BaseModel, work: Callable[..., T], *args: Any) -> T:
        """A request made ready to be run, beside the event loop.

        One that has a grammar keeps only others that have one waiting.
        """
        grammar = not _GRAMMARS.isdisjoint(body.model_fields_set)
        pool = self.models.compilers if grammar else self.models.workers
        return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *args))

    async def computed[T](self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The result of what has an engine compute it, and waits for that beside the event loop.

        Raises:
            DeadlineError: it takes longer than an answer may.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.settings.timeout):
                given = partial(work, *args, **kwargs)
                return await loop.run_in_executor(self.models.waiters, given)
        except TimeoutError:
            raise DeadlineError("the request's deadline has passed") from None


@dataclass(frozen=True)
class Call[B: BaseModel]:
    """One request.

    Attributes:
        service: what answers it.
        body: what was sent.
        request: its line and headers.
        id: what the client, or the service, calls it.
        notes: what the log says of it.
    """

    service: Service
    body: B
    request: Request
    id: str
    notes: dict[str, Any] = field(default_factory=dict)

    def note(self, **known: Any) -> None:
        """Has the log say what is known."""
        self.notes.update({name: value for name, value in known.items() if value is not None})

    def ignore(self, field: str, why: str) -> None:
        """Tells the client and the log of a field that changes nothing.

        Raises:
            ApiError: the service is strict.
        """
        if self.service.settings.strict:
            raise unsupported(why, field)
        ignored_fields.note(self.notes, field)


type Handler = Callable[[Any], Awaitable[Any]]

"""Endpoint: reads a request, runs its handler, sends the response; cancels it on disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from jinfer.server.core.service import Handler, RequestContext, Service
from jinfer.server.http import request_body
from jinfer.server.http.http_errors import (
    OPENAI_ERRORS,
    ErrorFormat,
    RunsElsewhereError,
    as_api_error,
    cancel_reason,
)
from jinfer.server.http.http_responses import (
    JSON_MEDIA_TYPE,
    HttpResponse,
    StreamedResponse,
    error_response,
)
from jinfer.server.http.request_body import ignored_fields
from jinfer.server.models.model_worker import forward
from jinfer.server.stores import resumable_streams

_log = logging.getLogger("jinfer.server")
_LARGE = 16384  # bytes from which a body is parsed in a worker thread


class EmptyBody(BaseModel):
    """The empty body."""


@dataclass(frozen=True)
class Endpoint:
    """A route of the server.

    Attributes:
        route: HTTP method and URL paths, separated by spaces; OpenAPI lists the first path.
        handler: async function that turns a `RequestContext` into a response or a stream. Its
            annotation, such as `RequestContext[ChatRequest]`, has the schema of the request body.
        summary: one line for OpenAPI.
        response_model: schema of a whole response; None: not JSON.
        stream: media type of a streamed response; "": it cannot stream.
        tag: OpenAPI tag.
        public: whether the route is open without an API key.
        media_type: media type of a whole response.
        errors: format of errors.
        query: names of query parameters, from `QUERY_PARAMETERS`.
        reader: reads and parses a body that is not JSON.
        body_media_type: media type of the body.
        success: HTTP status of success; 204 has no body.
    """

    route: str
    handler: Handler
    summary: str
    response_model: type[BaseModel] | None = None
    stream: str = ""
    tag: str = "jinfer"
    public: bool = False
    media_type: str = JSON_MEDIA_TYPE
    errors: ErrorFormat = OPENAI_ERRORS
    query: tuple[str, ...] = ()
    reader: Callable[[Request, Service], Awaitable[BaseModel]] | None = None
    body_media_type: str = JSON_MEDIA_TYPE
    success: int = 200

    @property
    def method(self) -> str:
        """HTTP method."""
        return self.route.split()[0]

    @property
    def paths(self) -> list[str]:
        """URL paths."""
        return self.route.split()[1:]

    @cached_property
    def request_model(self) -> type[BaseModel]:
        """Schema of the request body."""
        (body,) = get_args(get_type_hints(self.handler)["request"])
        return EmptyBody if body is Any else body


class Routes:
    """The endpoints of a module, which `add` collects in order.

    Args:
        **shared: fields of all its endpoints.
    """

    def __init__(self, **shared: Any) -> None:
        self.endpoints: list[Endpoint] = []
        self._shared = shared

    def add[H: Handler](
        self, route: str, response_model: type[BaseModel] | None = None, **fields: Any
    ) -> Callable[[H], H]:
        """Decorate the handler of a route; the first line of its docstring is the summary.

        Args:
            **fields: other fields of `Endpoint`.
        """

        def decorated(handler: H) -> H:
            summary = (handler.__doc__ or "").split("\n", 1)[0].removesuffix(".")
            known = {"response_model": response_model, **self._shared, **fields}
            self.endpoints.append(Endpoint(route, handler, summary, **known))
            return handler

        return decorated


class EndpointApp:
    """An endpoint as an ASGI application."""

    def __init__(self, endpoint: Endpoint, service: Service) -> None:
        self.endpoint, self.service = endpoint, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        notes = scope.setdefault("jinfer", {})
        notes["route"] = self.endpoint.paths[0]
        settings = self.service.settings
        http = Request(scope, receive)
        read = self.endpoint.reader
        data: bytes | BaseModel
        try:
            if read is None:
                data = await request_body.read_body(http, settings, self.service.bodies)
            else:
                data = await read(http, self.service)
        except ClientDisconnect:
            notes["gone"] = True
            return
        except Exception as error:
            await self._refuse(error, notes, send)
            return
        work = asyncio.ensure_future(self._answer(http, data, notes, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        self.service.answers.add(work)
        work.add_done_callback(self.service.answers.discard)
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                notes["gone"] = True
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait({work, gone})
        if not work.cancelled():
            work.result()

    async def _answer(
        self, http: Request, data: bytes | BaseModel, notes: dict[str, Any], send: Send
    ) -> None:
        settings = self.service.settings
        try:
            unread: list[tuple[str, str]] = []
            if isinstance(data, BaseModel):
                parsed = data
            elif len(data) > _LARGE:
                schema = self.endpoint.request_model
                parsed, unread = await self.service.in_thread(_read, data, schema)
            else:
                parsed, unread = _read(data or b"{}", self.endpoint.request_model)
            if settings.log_prompts and isinstance(data, bytes) and data:
                notes["body"] = data.decode("utf-8", "replace")
            request = RequestContext(self.service, parsed, http, notes.get("id", ""), notes)
            for field, why in unread:
                request.ignore(field, why)
            model = getattr(parsed, "model", http.query_params.get("model"))
            if model is not None and self.service.models.answers_to(model):
                request.ignore("model", "the server has a single model, which answers to any name")
            failure = await self._reply(request, data, send)
            if failure is not None:
                notes["error"] = as_api_error(failure).code
                _note(failure)
        except TimeoutError:
            # A client that does not read its response keeps the connection unusable.
            notes["gone"] = True
        except asyncio.CancelledError as error:
            if (reason := cancel_reason(error)) is None:
                raise
            await self._refuse(reason, notes, send)
        except Exception as error:
            await self._refuse(error, notes, send)

    async def _reply(
        self, request: RequestContext[Any], data: bytes | BaseModel, send: Send
    ) -> BaseException | None:
        """Answer a request, here or in the model's process; return a stream's final error."""
        settings, reply = self.service.settings, None
        try:
            reply = await self.endpoint.handler(request)
            answer: HttpResponse | StreamedResponse = reply
            id = request.http.headers.get(resumable_streams.HEADER)
            if id and isinstance(answer, StreamedResponse) and request.http.method == "POST":
                answers = self.service.answers
                answer = await self.service.streams.start(id, answer, settings.ping, answers)
            return await answer.send(send, settings.send_seconds, settings.ping)
        except RunsElsewhereError as found:
            failed = reply.failed if isinstance(reply, StreamedResponse) else None
            begun = failed if found.begun else None
            # The model's process reports and logs the fields without effect.
            request.notes.pop("ignored", None)
            request.notes["elsewhere"] = True
            async with self.service.models.keep_loaded(found.model, awake=found.awake) as model:
                assert model.worker is not None, "the model has its own process"
                socket, seconds = model.worker.socket, settings.send_seconds
                body = data if isinstance(data, bytes) else b""
                return await forward(
                    request.http,
                    body,
                    request.id,
                    socket,
                    send,
                    seconds,
                    begun=begun,
                    failed=failed,
                )

    async def _refuse(self, error: Exception, notes: dict[str, Any], send: Send) -> None:
        known = as_api_error(error, self.service.settings.retry_after)
        # An error message may quote the prompt.
        notes["error"] = known.message if self.service.settings.log_prompts else known.code
        notes["param"] = known.param
        if known.status == 500:
            _note(error)
        with contextlib.suppress(TimeoutError):
            reply = error_response(known, self.endpoint.errors)
            await reply.send(send, self.service.settings.send_seconds)


def _read(data: bytes, takes: type[BaseModel]) -> tuple[BaseModel, list[tuple[str, str]]]:
    """Parse a body; return it and the fields without effect, with reasons."""
    parsed = request_body.parse_body(data, takes)
    return parsed, list(ignored_fields(parsed))


def _note(error: BaseException) -> None:
    if as_api_error(error).status == 500:
        _log.error("a request failed", exc_info=error)


async def _disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass

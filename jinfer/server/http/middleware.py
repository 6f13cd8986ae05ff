"""Middleware (ASGI): request id, API key, access log, metrics and traces of every request."""

from __future__ import annotations

import contextlib
import hmac
import importlib.util
import logging
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from starlette.datastructures import Headers
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jinfer.server.http import request_body
from jinfer.server.http.http_errors import OPENAI_ERRORS, ApiError, ErrorFormat
from jinfer.server.http.http_responses import error_response
from jinfer.server.http.metrics import Metrics
from jinfer.server.http.server_settings import ServerSettings

_log = logging.getLogger("jinfer.access")
_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)


class RequestMiddleware:
    """Wraps the application."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        metrics: Metrics,
        public: Iterable[tuple[str, str]],
        errors: Mapping[str, ErrorFormat],
    ) -> None:
        """Wrap an application.

        Args:
            public: methods and paths that need no API key.
            errors: error format of each path.
        """
        self.app, self.settings, self.metrics = app, settings, metrics
        self._errors = errors
        self._public = [(method, compile_path(path)[0]) for method, path in public]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["path"].endswith("/"):  # a trailing slash names the same route, without a redirect
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        headers = Headers(scope=scope)
        id = headers.get("x-request-id", "")
        if not _ID.fullmatch(id):
            id = uuid.uuid4().hex
        open_to_all = self._is_public(scope["method"], scope["path"])
        notes: dict[str, Any] = {"id": id}
        scope["jinfer"] = notes
        begun = time.perf_counter()

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                notes["status"] = message["status"]
                message["headers"].append((b"x-request-id", id.encode()))
                if names := notes.get("ignored"):
                    header = request_body.ignored_header(names).encode()
                    message["headers"].append((request_body.HEADER.encode(), header))
            await send(message)

        with span(f"{scope['method']} {scope['path']}", headers, notes):
            try:
                if not open_to_all:
                    keys = headers.get("authorization", ""), headers.get("x-api-key", "")
                    check_api_key(self.settings.keys, *keys)
            except ApiError as error:
                notes["error"] = error.code
                reply = error_response(error, self._errors.get(scope["path"], OPENAI_ERRORS))
                await reply.send(noted, self.settings.send_seconds)
            else:
                await self.app(scope, receive, noted)
        # Health checks come every few seconds, and page assets by the dozen.
        # A model's own process logs the requests that it answers.
        quiet = notes.pop("elsewhere", False) or open_to_all
        usual = logging.DEBUG if quiet else logging.INFO
        self._count(scope, notes, time.perf_counter() - begun, usual)

    def _is_public(self, method: str, path: str) -> bool:
        read = "GET" if method == "HEAD" else method
        return any(read == item and pattern.match(path) for item, pattern in self._public)

    def _count(self, scope: Scope, notes: dict[str, Any], seconds: float, usual: int) -> None:
        status = notes.pop("status", 499 if notes.get("gone") else 500)
        route = notes.pop("route", "none")
        self.metrics.http.labels(route, str(status)).inc()
        level = logging.WARNING if status >= 500 and usual != logging.DEBUG else usual
        fields = {
            "request_id": notes.pop("id"),
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            **notes,
        }
        _log.log(level, "request", extra=fields)


def check_api_key(keys: Sequence[str], authorization: str, api_key: str) -> None:
    """Raise `ApiError` (401) if keys are required and the request has none of them.

    Args:
        authorization: value of the Authorization header, "Bearer KEY".
        api_key: value of the X-Api-Key header.
    """
    scheme, _, key = authorization.partition(" ")
    keys_sent = [key.strip() if scheme.lower() == "bearer" else "", api_key]
    # Every key is compared, so that the time does not reveal which one nearly matches.
    sent = [
        item.encode("latin-1", "replace") for item in keys_sent
    ]  # headers are decoded as latin-1
    found = [hmac.compare_digest(item, known.encode()) for item in sent for known in keys]
    if keys and not any(found):
        message = "a valid API key is needed: send the header Authorization: Bearer KEY"
        headers = {"www-authenticate": "Bearer"}
        raise ApiError(401, message, code="invalid_api_key", headers=headers)


@cache
def _tracer() -> Any:
    """Return the tracer of the application's provider; None without the package."""
    if importlib.util.find_spec("opentelemetry") is None:
        return None
    from opentelemetry import trace

    return trace.get_tracer("jinfer")


@contextlib.contextmanager
def span(name: str, headers: Mapping[str, str], notes: dict[str, Any]) -> Iterator[None]:
    """Trace a request in a span, a child of the span in its headers (traceparent).

    Args:
        notes: attributes set at the end; only numbers and strings are recorded.
    """
    tracer = _tracer()
    if tracer is None:
        yield
        return
    from opentelemetry import propagate, trace

    context = propagate.extract(headers)
    kind = trace.SpanKind.SERVER
    with tracer.start_as_current_span(name, context=context, kind=kind) as current:
        yield
        for key, value in notes.items():
            if isinstance(value, str | int | float | bool):
                current.set_attribute(f"jinfer.{key}", value)

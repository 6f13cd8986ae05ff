"""What every request passes on its way in and out: its id, the key, the log, the counts."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jinfer.server import auth
from jinfer.server.errors import ApiError
from jinfer.server.metrics import Metrics
from jinfer.server.replies import refusal
from jinfer.server.settings import Settings
from jinfer.server.traces import span

_log = logging.getLogger("jinfer.access")
_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)


class Gate:
    """Wraps the routes of a service."""

    def __init__(
        self, app: ASGIApp, settings: Settings, metrics: Metrics, public: Collection[str]
    ) -> None:
        """The gate before an app.

        Args:
            public: paths that need no key.
        """
        self.app, self.settings, self.metrics, self.public = app, settings, metrics, public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        id = headers.get("x-request-id", "")
        if not _ID.fullmatch(id):
            id = uuid.uuid4().hex
        notes: dict[str, Any] = {"id": id}
        scope["jinfer"] = notes
        begun = time.perf_counter()

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                notes["status"] = message["status"]
                message["headers"].append((b"x-request-id", id.encode()))
            await send(message)

        with span(f"{scope['method']} {scope['path']}", headers, notes):
            try:
                self._check(scope["path"], headers)
            except ApiError as error:
                notes["error"] = error.code
                await refusal(error).send(noted, self.settings.send_seconds)
            else:
                await self.app(scope, receive, noted)
        self._count(scope, notes, time.perf_counter() - begun)

    def _check(self, path: str, headers: Headers) -> None:
        if path in self.public:
            return
        given = headers.get("authorization", ""), headers.get("x-api-key", "")
        auth.check(self.settings.keys, *given)

    def _count(self, scope: Scope, notes: dict[str, Any], seconds: float) -> None:
        status = notes.pop("status", 499 if notes.get("gone") else 500)
        route = notes.pop("route", "none")
        self.metrics.http.labels(route, str(status)).inc()
        level = logging.WARNING if status >= 500 else logging.INFO
        if scope["path"] in self.public:  # a probe comes every few seconds
            level = logging.DEBUG
        fields = {
            "request_id": notes.pop("id"),
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            **notes,
        }
        _log.log(level, "request", extra=fields)

"""ASGI application (Starlette): routes, middleware and the lifespan that loads models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jinfer.api.user_errors import USER_ERRORS
from jinfer.loader.config.source_errors import SourceError
from jinfer.parallel.distributed.current_group import current_group
from jinfer.server.core.endpoint import Endpoint, EndpointApp
from jinfer.server.core.service import Service
from jinfer.server.http import request_body
from jinfer.server.http.http_errors import OPENAI_ERRORS, ApiError, ErrorFormat, process_lost
from jinfer.server.http.http_responses import dumps
from jinfer.server.http.metrics import Metrics
from jinfer.server.http.middleware import RequestMiddleware
from jinfer.server.http.server_settings import ServerSettings
from jinfer.server.models.model_manager import ModelManager
from jinfer.server.models.model_registry import ModelRegistry
from jinfer.server.openai.batches import BatchRunner
from jinfer.server.page.static_files import PAGE_TAG
from jinfer.server.routes import ENDPOINTS
from jinfer.server.stores.batch_store import BatchStore
from jinfer.server.stores.file_store import FileStore
from jinfer.server.stores.response_store import ResponseStore


def open_stores(settings: ServerSettings) -> dict[str, Any]:
    """Open the stores, as fields of `Service`.

    Raises:
        SourceError: a folder is unusable, or in use by another server.
    """
    responses = settings.responses_dir
    try:
        stores: dict[str, Any] = {
            "responses": ResponseStore(
                None if responses is None else Path(responses),
                settings.max_responses,
                settings.responses_bytes,
                settings.responses_seconds,
            )
        }
    except OSError as error:
        raise SourceError(f"--responses-dir {responses}: {error}") from None
    if settings.files_dir is not None:
        try:
            stores["files"] = FileStore(Path(settings.files_dir), settings.max_files)
            stores["batches"] = BatchStore(stores["files"])
        except OSError as error:
            raise SourceError(f"--files-dir {settings.files_dir}: {error}") from None
    return stores


_NOTIFY_SECONDS, _FLUSH_SECONDS = 1.0, 0.02  # for all clients; for the data of a client
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"}


def build_app(
    registry: ModelRegistry,
    settings: ServerSettings,
    *,
    on_load_error: Callable[[BaseException], Any] = lambda error: None,
    on_service: Callable[[Service], Any] = lambda service: None,
    more: Sequence[Route] = (),
) -> ASGIApp:
    """Build the ASGI application. Its models are loaded when the lifespan starts.

    Args:
        registry: sources of the models.
        on_load_error: called with the error if a model cannot be loaded at startup.
        on_service: called with the `Service` once it is built.
        more: additional routes, not in the OpenAPI document.

    Raises:
        SourceError, SpecError: the folder or the file of models cannot be read.
    """
    metrics = Metrics()
    models = ModelManager(registry, settings, unloaded=metrics.keep_totals)
    metrics.stats = models.stats
    service = Service(settings, models, metrics, **open_stores(settings))
    on_service(service)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if (group := current_group()) is not None:
            group.exit_callbacks.append(partial(_end_streams, service, asyncio.get_running_loop()))
        tasks = {
            asyncio.ensure_future(_load_models(models, on_load_error)),
            asyncio.ensure_future(metrics.watch_loop()),
        }
        if service.batches is not None:
            runner = BatchRunner(service, service.batches)
            tasks.add(asyncio.ensure_future(runner.run()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await service.response_jobs.close()
            if service.files is not None:
                service.files.close()
            await models.close()

    endpoints = [endpoint for endpoint in ENDPOINTS if settings.page or endpoint.tag != PAGE_TAG]
    errors = {path: endpoint.errors for endpoint in endpoints for path in endpoint.paths}
    app = Starlette(
        routes=[*_routes(endpoints, service), *more],
        lifespan=lifespan,
        exception_handlers={HTTPException: partial(_routing_error, errors)},
    )
    app.state.service = service
    public = [
        (endpoint.method, path)
        for endpoint in endpoints
        if endpoint.public
        for path in endpoint.paths
    ]
    gated: ASGIApp = RequestMiddleware(app, settings, metrics, public, errors)
    if settings.cors:
        gated = CORSMiddleware(
            gated,
            allow_origins=settings.cors,
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-request-id", request_body.HEADER],
        )
    return gated


def _end_streams(service: Service, loop: asyncio.AbstractEventLoop, reason: str) -> None:
    """End open streams with the reason of the exit, and wait until they are flushed."""

    async def tell() -> None:
        service.models.refuse_requests()
        service.cancel_answers(process_lost(reason))
        while service.answers:
            await asyncio.sleep(_FLUSH_SECONDS)
        await asyncio.sleep(_FLUSH_SECONDS)

    if reason:
        asyncio.run_coroutine_threadsafe(tell(), loop).result(_NOTIFY_SECONDS)


async def _load_models(models: ModelManager, on_load_error: Callable[[BaseException], Any]) -> None:
    try:
        await models.start()
    except (ApiError, *USER_ERRORS) as error:
        on_load_error(error)


def _routes(endpoints: Sequence[Endpoint], service: Service) -> list[Route]:
    """Create a Starlette route for each path, which dispatches on the HTTP method."""
    by_path: dict[str, dict[str, ASGIApp]] = {}
    for endpoint in endpoints:
        for path in endpoint.paths:
            by_path.setdefault(path, {})[endpoint.method] = EndpointApp(endpoint, service)
    return [
        Route(path, _MethodDispatch(answering), methods=sorted(_METHODS))
        for path, answering in by_path.items()
    ]


class _MethodDispatch:
    """Dispatches the requests of one path to the endpoint of their method."""

    def __init__(self, endpoints: dict[str, ASGIApp]) -> None:
        self.endpoints = endpoints

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        endpoint = self.endpoints.get(method)
        if endpoint is None:
            allowed = ", ".join(sorted(self.endpoints))
            raise HTTPException(405, headers={"allow": allowed})
        await endpoint(scope, receive, send)


async def _routing_error(
    errors: Mapping[str, ErrorFormat], request: Request, error: Exception
) -> Response:
    """Answer routing errors (404, 405) in the error format of the path."""
    assert isinstance(error, HTTPException)
    known = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return Response(
        dumps(errors.get(request.url.path, OPENAI_ERRORS).body(known)),
        error.status_code,
        headers=dict(error.headers or {}),
        media_type="application/json",
    )

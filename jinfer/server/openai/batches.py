"""Batch API: /v1/batches, and the runner that answers batches with low priority."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from asyncio import FIRST_COMPLETED, FIRST_EXCEPTION
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import orjson
from pydantic import BaseModel, Field
from starlette.requests import Request

from jinfer.server.core.chat_schemas import ChatRequest
from jinfer.server.core.endpoint import Routes
from jinfer.server.core.service import Handler, RequestContext, Service
from jinfer.server.http import schema_base as base
from jinfer.server.http.http_errors import (
    ApiError,
    RunsElsewhereError,
    as_api_error,
    invalid_request,
)
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.http.query_params import PAGE, listed_page
from jinfer.server.http.request_body import ignored_fields, parse_body
from jinfer.server.models.model_worker import forward
from jinfer.server.openai.chat import chat
from jinfer.server.openai.completions import CompletionRequest, completions
from jinfer.server.openai.embeddings import EmbeddingRequest, embeddings
from jinfer.server.openai.files import ExpiresAfter, file_store
from jinfer.server.openai.response_schemas import ResponseRequest
from jinfer.server.openai.responses import create_response
from jinfer.server.stores.batch_store import ENDED, BatchResults, BatchStore, Outcome, shown
from jinfer.server.stores.file_store import new_file_id

routes = Routes(tag="OpenAI")
_PATH = "/v1/batches/{batch_id}"

BatchEndpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
]


class BatchRequest(base.RequestModel):
    """A request to POST /v1/batches."""

    input_file_id: str
    endpoint: BatchEndpoint
    completion_window: str = Field(
        pattern=r"^[1-9][0-9]{0,2}h$", description="hours until the batch expires: 24h"
    )
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchObject(base.ResponseModel):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    request_counts: dict[str, int]
    errors: dict[str, Any] | None = None


class BatchList(base.ListPage):
    """The response of GET /v1/batches."""

    data: list[BatchObject]


@routes.add("POST /v1/batches", BatchObject)
async def create_batch(request: RequestContext[BatchRequest]) -> HttpResponse:
    """Answer a file of requests."""
    body, store = request.body, _store(request)
    file = store.files.get(body.input_file_id)
    if file is None:
        raise invalid_request(f"there is no file {body.input_file_id[:80]!r}", "input_file_id")
    if file.purpose != "batch":
        raise invalid_request("the purpose of the file is not batch", "input_file_id")
    request.note(metadata=body.metadata)
    expires = body.output_expires_after
    fields = {
        "endpoint": body.endpoint,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "metadata": body.metadata,
        "_output_seconds": None if expires is None else expires.seconds,
    }
    return HttpResponse(shown(store.create(fields, 3600 * int(body.completion_window[:-1]))))


@routes.add(f"GET {_PATH}", BatchObject)
async def retrieve_batch(request: RequestContext[Any]) -> HttpResponse:
    """Retrieve a batch."""
    return HttpResponse(shown(_batch(request)))


@routes.add("GET /v1/batches", BatchList, query=PAGE)
async def list_batches(request: RequestContext[Any]) -> HttpResponse:
    """List the batches."""
    return HttpResponse(
        listed_page(request.http, list(map(shown, _store(request).batches.values())))
    )


@routes.add(f"POST {_PATH}/cancel", BatchObject)
async def cancel_batch(request: RequestContext[Any]) -> HttpResponse:
    """Cancel a batch."""
    batch = _batch(request)
    if batch["status"] not in (*ENDED, "finalizing", "cancelling"):
        _store(request).move(batch, "cancelling")
    return HttpResponse(shown(batch))


def _store(request: RequestContext[Any]) -> BatchStore:
    file_store(request.service)
    assert request.service.batches is not None, "stores of files and batches exist together"
    return request.service.batches


def _batch(request: RequestContext[Any]) -> dict[str, Any]:
    """Return the batch of the path. Raises `ApiError`."""
    id = str(request.http.path_params["batch_id"])
    if (found := _store(request).batches.get(id)) is None:
        raise ApiError(404, f"there is no batch {id[:80]!r}", param="batch_id")
    return found


_log = logging.getLogger("jinfer.server")
PRIORITY = 1_000_000  # priority of batch requests; lower values are scheduled first
MAX_LINES = 50_000
_MAX_ERRORS = 100  # reported errors
# Endpoint -> its handler and schema.
RUNNABLE: Mapping[str, tuple[Handler, type[BaseModel]]] = {
    "/v1/chat/completions": (chat, ChatRequest),
    "/v1/completions": (completions, CompletionRequest),
    "/v1/embeddings": (embeddings, EmbeddingRequest),
    "/v1/responses": (create_response, ResponseRequest),
}


@dataclass(frozen=True)
class BatchLine:
    """A request of a batch: the position of its line in the file.

    Attributes:
        custom_id: the client's id.
        model: the name of its model.
    """

    custom_id: str
    start: int
    length: int
    model: str | None


@dataclass(eq=False)
class BatchErrors(Exception):
    """Raised for an invalid batch file.

    Attributes:
        errors: code, message, param and line of each error, in OpenAI's form.
    """

    errors: list[dict[str, Any]]


def read_lines(path: Path, endpoint: str, max_bytes: int) -> list[BatchLine]:
    """Read the requests of a batch's file. Slow.

    Args:
        max_bytes: maximum size of a line.

    Raises:
        BatchErrors: lines that are not requests to the endpoint.
    """
    lines: dict[str, BatchLine] = {}
    errors: list[dict[str, Any]] = []
    start = 0
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                if text.strip():
                    if len(lines) >= MAX_LINES:
                        raise _line_error(
                            "too_many_tasks", f"the file has more than {MAX_LINES} lines"
                        )
                    line = _read_line(text, start, endpoint, max_bytes)
                    if line.custom_id in lines:
                        raise _line_error(
                            "duplicate_custom_id", "another line has this custom_id", "custom_id"
                        )
                    lines[line.custom_id] = line
            except ApiError as error:
                known = {"code": error.code, "message": error.message, "param": error.param}
                errors.append({**known, "line": number})
                if len(errors) >= _MAX_ERRORS or error.code == "too_many_tasks":
                    break
            start += len(text)
    if not lines and not errors:
        empty = {"code": "empty_file", "message": "the file has no line", "param": None}
        errors.append({**empty, "line": None})
    if errors:
        raise BatchErrors(errors)
    return list(lines.values())


def _read_line(text: bytes, start: int, endpoint: str, max_bytes: int) -> BatchLine:
    if len(text) > max_bytes:
        raise _line_error("line_too_long", f"the line has more than {max_bytes} bytes")
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _line_error("invalid_json_line", f"the line is not JSON: {error}"[:200]) from None
    if not isinstance(value, dict):
        raise _line_error("invalid_json_line", "the line is not a JSON object")
    id, body = value.get("custom_id"), value.get("body")
    if not isinstance(id, str) or not 0 < len(id) <= 512:
        raise _line_error("missing_required_parameter", "the line has no custom_id", "custom_id")
    if value.get("method") != "POST":
        raise _line_error("invalid_method", "the method must be POST", "method")
    if value.get("url") != endpoint:
        raise _line_error("mismatched_endpoint", f"the batch is for {endpoint}", "url")
    if not isinstance(body, dict):
        raise _line_error(
            "missing_required_parameter", "the line has no body, which must be an object", "body"
        )
    model = body.get("model")
    return BatchLine(id, start, len(text), model if isinstance(model, str) else None)


def _line_error(code: str, message: str, param: str | None = None) -> ApiError:
    return invalid_request(message, param, code)


async def answer_line(
    service: Service, endpoint: str, path: Path, line: BatchLine
) -> tuple[int, Any, str]:
    """Answer a request of a batch; return status, body and request id."""
    id = uuid.uuid4().hex
    handler, schema = RUNNABLE[endpoint]
    scope = {"type": "http", "method": "POST", "path": endpoint, "headers": [], "query_string": b""}
    try:
        body, data = await service.in_thread(_read_body, path, line, schema)
        request = RequestContext(service, body, Request(scope), id)
        for field, why in ignored_fields(body):
            request.ignore(field, why)
        try:
            reply = cast("HttpResponse", await handler(request))
        except RunsElsewhereError as found:
            return await _elsewhere(service, found, Request(scope), data, id)
        content = reply.content
        return 200, orjson.loads(content) if isinstance(content, bytes) else content, id
    except Exception as error:
        known = as_api_error(error)
        if known.status == 500:
            _log.error("a request of a batch failed", exc_info=error)
        return known.status, known.body(), id


async def _elsewhere(
    service: Service, found: RunsElsewhereError, request: Request, data: bytes, id: str
) -> tuple[int, Any, str]:
    """Forward a request to the process of its model."""
    status, pieces = 0, list[bytes]()

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        pieces.append(message.get("body", b""))

    async with service.models.keep_loaded(found.model, awake=found.awake) as model:
        assert model.worker is not None, "the model has its own process"
        seconds = service.settings.send_seconds
        await forward(request, data, id, model.worker.socket, send, seconds)
    return status, orjson.loads(b"".join(pieces)), id


def _read_body(path: Path, line: BatchLine, schema: type[BaseModel]) -> tuple[BaseModel, bytes]:
    """Read a request's body with the batch's priority, parsed and as JSON. Raises `ApiError`."""
    with path.open("rb") as file:
        file.seek(line.start)
        value = orjson.loads(file.read(line.length))["body"]
    body: Any = parse_body(orjson.dumps(value), schema)
    for name in ("stream", "background"):
        if getattr(body, name, None):
            raise invalid_request("answers of a batch are not streamed; leave it out", name)
    if "priority" in schema.model_fields:
        body.priority = value["priority"] = PRIORITY
    if isinstance(body, ResponseRequest) and body.store is None:
        body.store = value["store"] = False
    return body, orjson.dumps(value)


_AGAIN = ("queue_full", "loading", "closing", "process_silent")  # temporary errors
_PAUSE = 1.0  # seconds until a retry
_LOOK = 60.0  # seconds between two checks for expired files and batches
type Answer = Callable[[Service, str, Path, BatchLine], Awaitable[tuple[int, Any, str]]]


@dataclass
class BatchRunner:
    """Runs the batches of a server.

    Attributes:
        service: the server.
        store: its batches.
        answer: function that answers a line.
    """

    service: Service
    store: BatchStore
    answer: Answer = answer_line

    def __post_init__(self) -> None:
        # Other requests are scheduled first, so an answer has no time limit.
        self.service = replace(self.service, settings=replace(self.service.settings, timeout=None))

    async def run(self) -> None:
        """Run batches until cancelled."""
        while True:
            self.store.changed.clear()
            if (batch := self.store.next()) is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK):
                        await self.store.changed.wait()
                self.store.files.remove_expired()
                continue
            try:
                await self.run_batch(batch)
            except Exception as error:
                _log.error("a batch failed", exc_info=error)
                reason = {"code": "server_error", "message": "the server failed to run this batch"}
                self._fail(batch, [{**reason, "param": None, "line": None}])

    async def run_batch(self, batch: dict[str, Any]) -> None:
        """Run a batch to its end, from its current state."""
        outcome: Outcome = batch.get("_outcome", "completed")
        if batch["status"] != "finalizing":
            path = self.store.files.path(batch["input_file_id"])
            try:
                lines = await self.service.in_thread(
                    read_lines, path, batch["endpoint"], self.service.settings.max_body
                )
            except BatchErrors as error:
                self._fail(batch, error.errors)
                return
            if batch["status"] == "validating":
                self.store.move(batch, "in_progress")
            results = await self.service.in_thread(self.store.results, batch)
            try:
                outcome = await self._answer_all(batch, path, lines, results)
                if outcome == "expired":
                    await self.service.in_thread(_write_expired, lines, results)
                self._count(batch, lines, results)
            finally:
                results.close()
        await self._finish(batch, outcome)

    def _fail(self, batch: dict[str, Any], errors: list[dict[str, Any]]) -> None:
        self.store.move(batch, "failed", errors={"object": "list", "data": errors})
        _log.info("batch failed", extra={"batch": batch["id"]})

    async def _answer_all(
        self, batch: dict[str, Any], path: Path, lines: list[BatchLine], results: BatchResults
    ) -> Outcome:
        """Answer the lines without an answer; return the outcome of the batch."""
        done = results.completed | results.failed
        left = iter([line for line in lines if line.custom_id not in done])
        self._count(batch, lines, results)

        async def work() -> None:
            for line in left:
                while self.service.models.waiting:  # requests that wait for a model have priority
                    await asyncio.sleep(_PAUSE)
                await self._answer(batch, path, line, results)
                self._count(batch, lines, results)

        count = await self._at_a_time(batch, lines)
        tasks = [asyncio.ensure_future(work()) for _ in range(count)]
        stopped = asyncio.ensure_future(self._stopped(batch))
        working = asyncio.ensure_future(asyncio.wait(tasks, return_when=FIRST_EXCEPTION))
        try:
            await asyncio.wait({working, stopped}, return_when=FIRST_COMPLETED)
            if not working.done():
                return "cancelled" if batch["status"] == "cancelling" else "expired"
            for task in tasks:
                if task.done():
                    task.result()
            return "completed"
        finally:
            for item in (*tasks, working, stopped):
                item.cancel()
            await asyncio.gather(*tasks, working, stopped, return_exceptions=True)

    async def _at_a_time(self, batch: dict[str, Any], lines: list[BatchLine]) -> int:
        """Return the number of concurrent requests: one less than the slots of the model."""
        while not self.service.models.ready:
            await asyncio.sleep(_PAUSE)
        if batch["endpoint"] == "/v1/embeddings":
            return 1  # texts are computed between the engine's steps
        with contextlib.suppress(Exception):
            async with self.service.models.use(lines[0].model) as model:
                return max(1, model.session.engine.scheduler.slots - 1)  # a slot for others
        return 1

    async def _stopped(self, batch: dict[str, Any]) -> None:
        """Wait until a batch is cancelled or has expired."""
        while batch["status"] != "cancelling" and (left := batch["expires_at"] - time.time()) > 0:
            self.store.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, _LOOK)):
                    await self.store.changed.wait()

    async def _answer(
        self, batch: dict[str, Any], path: Path, line: BatchLine, results: BatchResults
    ) -> None:
        """Answer a line, and write the result."""
        while True:
            status, body, id = await self.answer(self.service, batch["endpoint"], path, line)
            code = body["error"].get("code") if status >= 400 else None
            if code not in _AGAIN:
                break
            await asyncio.sleep(_PAUSE)
        response = {"status_code": status, "request_id": id, "body": body}
        # Not in a thread: the write would outlive a cancelled task.
        results.write(line.custom_id, _result(line, response, None), failed=status >= 400)

    def _count(self, batch: dict[str, Any], lines: list[BatchLine], results: BatchResults) -> None:
        batch["request_counts"] = {
            "total": len(lines),
            "completed": len(results.completed),
            "failed": len(results.failed),
        }

    async def _finish(self, batch: dict[str, Any], outcome: Outcome) -> None:
        """Make files of the results; resume after a crash of the server."""
        names = ("output_file_id", "error_file_id")
        paths = self.store.result_paths(batch)
        if batch["status"] != "finalizing":
            ids = {
                name: new_file_id()
                for name, path in zip(names, paths, strict=True)
                if path.exists() and path.stat().st_size
            }
            self.store.move(batch, "finalizing", _outcome=outcome, **ids)
        for name, path in zip(names, paths, strict=True):
            if batch[name] is not None and path.exists():
                kind = "output" if name == "output_file_id" else "error"
                await self.service.in_thread(
                    self.store.files.add,
                    path,
                    f"{batch['id']}_{kind}.jsonl",
                    "batch_output",
                    batch["_output_seconds"],
                    batch[name],
                )
            path.unlink(missing_ok=True)
        self.store.move(batch, outcome)
        _log.info("batch ended", extra={"batch": batch["id"], "status": outcome})


def _result(line: BatchLine, response: Any, error: Any) -> dict[str, Any]:
    """Format a line of an output or error file."""
    id = f"batch_req_{uuid.uuid4().hex}"
    return {"id": id, "custom_id": line.custom_id, "response": response, "error": error}


def _write_expired(lines: list[BatchLine], results: BatchResults) -> None:
    """Write an error for each line without an answer."""
    message = "This request could not be executed before the completion window expired."
    error = {"code": "batch_expired", "message": message}
    for line in _without(lines, results):
        results.write(line.custom_id, _result(line, None, error), failed=True)


def _without(lines: list[BatchLine], results: BatchResults) -> Iterator[BatchLine]:
    done = results.completed | results.failed
    return (line for line in lines if line.custom_id not in done)

"""Batch input: the lines of a file of requests (JSONL), and how one of them is answered."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson
from pydantic import BaseModel
from starlette.requests import Request

from jinfer.server.core.chat_schemas import ChatRequest
from jinfer.server.core.service import Handler, RequestContext, Service
from jinfer.server.http.http_errors import (
    ApiError,
    RunsElsewhereError,
    as_api_error,
    invalid_request,
)
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.http.ignored_fields import ignored_fields
from jinfer.server.http.request_body import parse_body
from jinfer.server.models.forwarding import forward
from jinfer.server.openai.chat import chat
from jinfer.server.openai.completions import CompletionRequest, completions
from jinfer.server.openai.embeddings import EmbeddingRequest, embeddings
from jinfer.server.openai.response_schemas import ResponseRequest
from jinfer.server.openai.responses import create_response

_log = logging.getLogger("jinfer.server")
PRIORITY = 1_000_000  # of a batch's requests; lower ones go first
MAX_LINES = 50_000
_MAX_ERRORS = 100  # that are told
# Endpoint -> what answers a request to it.
RUNNABLE: Mapping[str, tuple[Handler, type[BaseModel]]] = {
    "/v1/chat/completions": (chat, ChatRequest),
    "/v1/completions": (completions, CompletionRequest),
    "/v1/embeddings": (embeddings, EmbeddingRequest),
    "/v1/responses": (create_response, ResponseRequest),
}


@dataclass(frozen=True)
class BatchLine:
    """A request of a batch: where its line is in the file.

    Attributes:
        custom_id: what its sender calls it.
        model: the model that it names.
    """

    custom_id: str
    start: int
    length: int
    model: str | None


@dataclass(eq=False)
class BatchErrors(Exception):
    """A file that is no batch of requests.

    Attributes:
        errors: code, message, param and line of each error, in OpenAI's form.
    """

    errors: list[dict[str, Any]]


def read_lines(path: Path, endpoint: str, most_bytes: int) -> list[BatchLine]:
    """The requests of a batch's file. Slow.

    Args:
        most_bytes: of a line.

    Raises:
        BatchErrors: lines that are no requests to the endpoint.
    """
    lines: dict[str, BatchLine] = {}
    errors: list[dict[str, Any]] = []
    start = 0
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                if text.strip():
                    if len(lines) >= MAX_LINES:
                        raise _line_error("too_many_tasks", f"it has more than {MAX_LINES} lines")
                    one = _read_line(text, start, endpoint, most_bytes)
                    if one.custom_id in lines:
                        raise _line_error(
                            "duplicate_custom_id", "another line has this custom_id", "custom_id"
                        )
                    lines[one.custom_id] = one
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


def _read_line(text: bytes, start: int, endpoint: str, most_bytes: int) -> BatchLine:
    if len(text) > most_bytes:
        raise _line_error("line_too_long", f"the line has more than {most_bytes} bytes")
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _line_error("invalid_json_line", f"the line is not JSON: {error}"[:200]) from None
    if not isinstance(value, dict):
        raise _line_error("invalid_json_line", "the line is not a JSON object")
    id, body = value.get("custom_id"), value.get("body")
    if not isinstance(id, str) or not 0 < len(id) <= 512:
        raise _line_error("missing_required_parameter", "it has no custom_id", "custom_id")
    if value.get("method") != "POST":
        raise _line_error("invalid_method", "the method is POST", "method")
    if value.get("url") != endpoint:
        raise _line_error("mismatched_endpoint", f"the batch is for {endpoint}", "url")
    if not isinstance(body, dict):
        raise _line_error("missing_required_parameter", "it has no body, an object", "body")
    model = body.get("model")
    return BatchLine(id, start, len(text), model if isinstance(model, str) else None)


def _line_error(code: str, message: str, param: str | None = None) -> ApiError:
    return invalid_request(message, param, code)


async def answer_line(
    service: Service, endpoint: str, path: Path, line: BatchLine
) -> tuple[int, Any, str]:
    """Answers a request of a batch. Returns status, body and request id."""
    id = uuid.uuid4().hex
    handler, schema = RUNNABLE[endpoint]
    scope = {"type": "http", "method": "POST", "path": endpoint, "headers": [], "query_string": b""}
    try:
        body, data = await service.in_thread(_read_body, path, line, schema)
        call = RequestContext(service, body, Request(scope), id)
        for field, why in ignored_fields(body):
            call.ignore(field, why)
        try:
            reply = cast("HttpResponse", await handler(call))
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
    """Has a request answered by the process that its model has."""
    status, pieces = 0, list[bytes]()

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        pieces.append(message.get("body", b""))

    async with service.models.hold(found.model, awake=found.awake) as one:
        assert one.worker is not None, "it has a process of its own"
        seconds = service.settings.send_seconds
        await forward(request, data, id, one.worker.socket, send, seconds)
    return status, orjson.loads(b"".join(pieces)), id


def _read_body(path: Path, line: BatchLine, schema: type[BaseModel]) -> tuple[BaseModel, bytes]:
    """The body of a request, parsed and as JSON, with the batch's priority. Raises `ApiError`."""
    with path.open("rb") as file:
        file.seek(line.start)
        value = orjson.loads(file.read(line.length))["body"]
    body: Any = parse_body(orjson.dumps(value), schema)
    for name in ("stream", "background"):
        if getattr(body, name, None):
            raise invalid_request("a batch gives whole answers; leave it out", name)
    if "priority" in schema.model_fields:
        body.priority = value["priority"] = PRIORITY
    if isinstance(body, ResponseRequest) and body.store is None:
        body.store = value["store"] = False
    return body, orjson.dumps(value)

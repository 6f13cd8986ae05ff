"""Batch API: /v1/batches, created, retrieved, listed and cancelled."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from jinfer.server.core.endpoint import Routes
from jinfer.server.core.service import RequestContext
from jinfer.server.http import schema_base as base
from jinfer.server.http.http_errors import ApiError, invalid_request
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.http.query_params import PAGE, listed_page
from jinfer.server.openai.files import ExpiresAfter, file_store
from jinfer.server.stores.batch_store import ENDED, BatchStore, shown

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


class BatchList(base.ResponseModel):
    """The response of GET /v1/batches."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


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

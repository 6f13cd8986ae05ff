"""Schemas of the Batch API."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from jinfer.server.schemas import schema_base as base
from jinfer.server.schemas.files import ExpiresAfter

BatchEndpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
]


class BatchRequest(base.RequestModel):
    """A request to POST /v1/batches."""

    input_file_id: str
    endpoint: BatchEndpoint
    completion_window: str = Field(
        pattern=r"^[1-9][0-9]{0,2}h$", description="hours until it expires: 24h"
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

"""Schemas of the Files API."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, PrivateAttr

from jinfer.server.schemas import schema_base as base

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]


class ExpiresAfter(base.RequestModel):
    """When a file is removed."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2592000)


class UploadRequest(base.RequestModel):
    """A request to POST /v1/files, as multipart/form-data."""

    file: str = Field(json_schema_extra={"format": "binary"})
    purpose: Purpose
    expires_after: ExpiresAfter | None = None
    _path: Path = PrivateAttr()
    _bytes: int = PrivateAttr(0)


class FileObject(base.ResponseModel):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(base.ResponseModel):
    """The response of GET /v1/files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


class DeletedFile(base.ResponseModel):
    """The response of DELETE /v1/files/{file_id}."""

    id: str
    object: Literal["file"]
    deleted: bool

"""Files API: /v1/files, uploaded as multipart/form-data, listed, read and deleted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import Field, PrivateAttr
from starlette.requests import Request

from jinfer.server.core.endpoint import Routes
from jinfer.server.core.service import RequestContext, Service
from jinfer.server.http import schema_base as base
from jinfer.server.http.http_errors import ApiError, invalid_request
from jinfer.server.http.http_responses import HttpResponse, StreamedResponse
from jinfer.server.http.query_params import MAX_LISTED, PAGE, listed_page, query_value
from jinfer.server.http.request_body import validated
from jinfer.server.stores.file_store import FileStore, StoredFile

_HEAD_BYTES = 8 << 10  # of a part's headers
_FIELD_BYTES = 64 << 10
_MAX_PARTS = 32


def boundary_of(content_type: str) -> bytes:
    """Return the boundary of a Content-Type header. Raises `ApiError`."""
    head = HeaderParser().parsestr(f"Content-Type: {content_type}")
    boundary = head.get_boundary("")
    if head.get_content_type() != "multipart/form-data" or not 0 < len(boundary) <= 70:
        raise ApiError(
            415, "the body must be multipart/form-data, with a boundary", code="unsupported_type"
        )
    return boundary.encode("latin-1", "replace")


@dataclass
class MultipartParser:
    """Parses a body.

    Attributes:
        boundary: separator of the parts.
        file: name of the field with the file.
        sink: opens the destination of the file.
        fields: the short fields by name.
        filename: name of the file; None before it is known.
        ended: whether the last boundary was read.
    """

    boundary: bytes
    file: str
    sink: Callable[[], BinaryIO]
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    ended: bool = False

    def __post_init__(self) -> None:
        self._delimiter = b"\r\n--" + self.boundary
        self._buffer = bytearray(b"\r\n")  # so that the first boundary follows a line break
        self._name: str | None = None  # of the part whose content is being read
        self._in_head = False
        self._value = bytearray()
        self._open: BinaryIO | None = None
        self._parts = 0

    def push(self, data: bytes) -> None:
        """Parse a piece. Raises `ApiError` for invalid or too long parts."""
        if self.ended:
            return  # ignore the epilogue
        self._buffer += data
        while not self.ended and (self._head() if self._in_head else self._content()):
            pass

    def finish(self) -> None:
        """Check that the body is whole. Raises `ApiError`."""
        self.close()
        if not self.ended:
            raise _wrong("it ends before its last boundary")

    def close(self) -> None:
        """Close the file."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _content(self) -> bool:
        """Read a part's content up to the next boundary; return False if more data is needed."""
        place = self._buffer.find(self._delimiter)
        if place < 0:
            self._take(max(0, len(self._buffer) - len(self._delimiter) + 1))
            return False
        after = place + len(self._delimiter)
        if len(self._buffer) < after + 2:
            self._take(place)
            return False
        self._take(place)
        sign = bytes(self._buffer[len(self._delimiter) :][:2])
        if sign not in (b"--", b"\r\n"):
            raise _wrong("something follows a boundary in its line")
        self._end_part()
        del self._buffer[: len(self._delimiter) + 2]
        self.ended = sign == b"--"
        self._in_head = not self.ended
        return True

    def _take(self, count: int) -> None:
        """Move `count` bytes of the buffer to the part."""
        if self._open is not None:
            self._open.write(self._buffer[:count])
        elif self._name is not None:
            self._value += self._buffer[:count]
            if len(self._value) > _FIELD_BYTES:
                raise _wrong(f"{self._name[:80]} has more than {_FIELD_BYTES} bytes")
        del self._buffer[:count]

    def _end_part(self) -> None:
        if self._open is None and self._name is not None:
            try:
                self.fields[self._name] = self._value.decode()
            except UnicodeDecodeError:
                raise _wrong(f"{self._name[:80]} is not UTF-8") from None
        self.close()
        self._name, self._value = None, bytearray()

    def _head(self) -> bool:
        """Read a part's headers; return False if more data is needed."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or end > _HEAD_BYTES:
            if len(self._buffer) > _HEAD_BYTES:
                raise _wrong(f"a part's headers have more than {_HEAD_BYTES} bytes")
            return False
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise _wrong(f"it has more than {_MAX_PARTS} parts")
        text = self._buffer[:end].decode("utf-8", "replace")
        del self._buffer[: end + 4]
        head = HeaderParser().parsestr(text)
        name = head.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise _wrong("a part has no name in its Content-Disposition")
        if name in self.fields or (name == self.file and self.filename is not None):
            raise _wrong(f"it has {name[:80]} twice")
        self._name, self._in_head = name, False
        if name == self.file:
            self.filename = head.get_filename() or "file"
            self._open = self.sink()
        return True


def _wrong(reason: str) -> ApiError:
    return invalid_request(f"the multipart body is wrong: {reason}", code="invalid_multipart")


routes = Routes(tag="OpenAI")
_PATH = "/v1/files/{file_id}"

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]


class ExpiresAfter(base.RequestModel):
    """The expiration of a file."""

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


class FileList(base.ListPage):
    """The response of GET /v1/files."""

    data: list[FileObject]


class DeletedFile(base.ResponseModel):
    """The response of DELETE /v1/files/{file_id}."""

    id: str
    object: Literal["file"]
    deleted: bool


_PIECE = 1 << 20  # bytes per read
_SLOWEST = 64 << 10  # minimum bytes per second of an upload
_NESTED = re.compile(r"expires_after\[(\w+)\]")


def file_store(service: Service) -> FileStore:
    """Return the server's file store. Raises `ApiError` without a store."""
    if service.files is None:
        reason = "the server does not store files; serve with --files-dir FOLDER"
        raise ApiError(403, reason, code="not_allowed")
    return service.files


async def receive_upload(request: Request, service: Service) -> UploadRequest:
    """Read the body of an upload into a temporary file of the folder.

    Raises:
        ApiError: the body is too long, invalid or late.
        ClientDisconnect: the client has disconnected.
    """
    store = file_store(service)
    boundary = boundary_of(request.headers.get("content-type", ""))
    path, max_bytes = store.half(), min(service.settings.max_file, store.room())

    def sink() -> BinaryIO:
        return path.open("wb")

    parser, size = MultipartParser(boundary, "file", sink), 0
    try:
        # The time limit grows with the received bytes, so that large files may take longer.
        async with asyncio.timeout(service.settings.body_seconds) as limit:
            end = limit.when() or 0.0
            async for piece in request.stream():
                size += len(piece)
                if size > max_bytes + _PIECE:
                    raise _too_long(max_bytes)
                parser.push(piece)
                limit.reschedule(end + size / _SLOWEST)
        parser.finish()
        upload = validated(_values(parser), UploadRequest)
        upload._path, upload._bytes = path, path.stat().st_size
        if upload._bytes > max_bytes:
            raise _too_long(max_bytes)
    except BaseException as error:
        parser.close()
        path.unlink(missing_ok=True)
        if isinstance(error, TimeoutError):
            raise ApiError(408, "the file did not arrive in time") from None
        raise
    return upload


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the file is longer than the {max(0, max_bytes)} bytes of free space",
        param="file",
        code="body_too_large",
        headers={"connection": "close"},
    )


def _values(parser: MultipartParser) -> dict[str, Any]:
    """Return the fields of a form; fields in brackets become an object."""
    values: dict[str, Any] = {}
    for name, text in parser.fields.items():
        if (nested := _NESTED.fullmatch(name)) is not None:
            item: Any = (
                int(text) if text.isascii() and text.isdecimal() and len(text) < 17 else text
            )
            values.setdefault("expires_after", {})[nested[1]] = item
        else:
            values[name] = text
    if parser.filename is not None:
        values["file"] = parser.filename
    return values


@routes.add(
    "POST /v1/files", FileObject, reader=receive_upload, body_media_type="multipart/form-data"
)
async def upload(request: RequestContext[UploadRequest]) -> HttpResponse:
    """Upload a file."""
    body, store = request.body, file_store(request.service)
    seconds = None if body.expires_after is None else body.expires_after.seconds
    try:
        file = await request.service.in_thread(
            store.add, body._path, body.file, body.purpose, seconds
        )
    finally:
        body._path.unlink(missing_ok=True)
    return HttpResponse(file.shown())


@routes.add("GET /v1/files", FileList, query=("purpose", *PAGE))
async def list_files(request: RequestContext[Any]) -> HttpResponse:
    """List the files."""
    purpose = query_value(request.http, "purpose")
    listed = [
        file.shown()
        for file in file_store(request.service).listed()
        if purpose is None or file.purpose == purpose
    ]
    return HttpResponse(listed_page(request.http, listed, MAX_LISTED))


@routes.add(f"GET {_PATH}", FileObject)
async def retrieve_file(request: RequestContext[Any]) -> HttpResponse:
    """Describe a file."""
    return HttpResponse(_file(request).shown())


@routes.add(f"GET {_PATH}/content", media_type="application/octet-stream")
async def file_content(request: RequestContext[Any]) -> StreamedResponse:
    """Download a file."""
    path = file_store(request.service).path(_file(request).id)
    return StreamedResponse(_pieces(path, request.service), media_type="application/octet-stream")


async def _pieces(path: Path, service: Service) -> AsyncGenerator[bytes]:
    opened: BinaryIO = await service.in_thread(path.open, "rb")
    with opened as file:
        while piece := await service.in_thread(file.read, _PIECE):
            yield piece


@routes.add(f"DELETE {_PATH}", DeletedFile)
async def delete_file(request: RequestContext[Any]) -> HttpResponse:
    """Delete a file."""
    store, id = file_store(request.service), _file(request).id
    if (batch := request.service.batches and request.service.batches.reader_of(id)) is not None:
        raise invalid_request(f"{batch} reads it; cancel that first", "file_id")
    await request.service.in_thread(store.delete, id)
    return HttpResponse({"id": id, "object": "file", "deleted": True})


def _file(request: RequestContext[Any]) -> StoredFile:
    """Return the file of the path. Raises `ApiError`."""
    id = str(request.http.path_params["file_id"])
    if (found := file_store(request.service).get(id)) is None:
        raise ApiError(404, f"there is no file {id[:80]!r}", param="file_id")
    return found

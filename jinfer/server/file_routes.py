"""Routes of the Files API and the Batch API."""

from __future__ import annotations

from functools import partial

from jinfer.server import batches, files
from jinfer.server.endpoint import Endpoint
from jinfer.server.query_params import PAGE
from jinfer.server.schemas import batches as batch
from jinfer.server.schemas import files as file

_openai = partial(Endpoint, tag="OpenAI")
_FILE, _BATCH = "/v1/files/{file_id}", "/v1/batches/{batch_id}"

FILE_ENDPOINTS: tuple[Endpoint, ...] = (
    _openai(
        "POST /v1/files",
        files.upload,
        "Keeps a file",
        file.FileObject,
        reader=files.receive_upload,
        body_media_type="multipart/form-data",
    ),
    _openai(
        "GET /v1/files",
        files.list_files,
        "The files",
        file.FileList,
        query=("purpose", *PAGE),
    ),
    _openai(f"GET {_FILE}", files.retrieve_file, "One of the files", file.FileObject),
    _openai(f"DELETE {_FILE}", files.delete_file, "Removes a file", file.DeletedFile),
    _openai(
        f"GET {_FILE}/content",
        files.file_content,
        "The content of a file",
        media_type="application/octet-stream",
    ),
    _openai(
        "POST /v1/batches", batches.create_batch, "Answers a file of requests", batch.BatchObject
    ),
    _openai("GET /v1/batches", batches.list_batches, "The batches", batch.BatchList, query=PAGE),
    _openai(f"GET {_BATCH}", batches.retrieve_batch, "One of the batches", batch.BatchObject),
    _openai(f"POST {_BATCH}/cancel", batches.cancel_batch, "Ends a batch", batch.BatchObject),
)

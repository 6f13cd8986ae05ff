"""Routes of the Responses API."""

from __future__ import annotations

from functools import partial

from jinfer.server.core.endpoint import Endpoint
from jinfer.server.http.http_responses import SSE_MEDIA_TYPE
from jinfer.server.http.query_params import PAGE
from jinfer.server.openai import batches, files, stored_responses
from jinfer.server.openai import batches as batch
from jinfer.server.openai import files as file
from jinfer.server.openai import response_schemas as schemas
from jinfer.server.openai.responses import create_response

_openai = partial(Endpoint, tag="OpenAI")
_ONE = "/v1/responses/{response_id}"

# `input_tokens` stands before the ids, of which it would be one.
RESPONSE_ENDPOINTS: tuple[Endpoint, ...] = (
    _openai(
        "POST /v1/responses /responses",
        create_response,
        "Answers a conversation",
        schemas.ResponseObject,
        SSE_MEDIA_TYPE,
    ),
    _openai(
        "POST /v1/responses/input_tokens",
        stored_responses.input_tokens,
        "Counts the tokens that a response would answer",
        schemas.InputTokens,
    ),
    _openai(
        f"GET {_ONE}",
        stored_responses.retrieve,
        "A stored response",
        schemas.ResponseObject,
        SSE_MEDIA_TYPE,
        query=("stream", "starting_after"),
    ),
    _openai(
        f"DELETE {_ONE}",
        stored_responses.delete,
        "Removes a stored response",
        schemas.DeletedResponse,
    ),
    _openai(
        f"POST {_ONE}/cancel",
        stored_responses.cancel,
        "Ends a response in the background",
        schemas.ResponseObject,
    ),
    _openai(
        f"GET {_ONE}/input_items",
        stored_responses.input_items,
        "What a stored response answers",
        schemas.InputItems,
        query=PAGE,
    ),
)


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

"""OpenAI routes: the table of the endpoints of OpenAI's dialect."""

from __future__ import annotations

from functools import partial

from jinfer.server.core import info
from jinfer.server.core.chat_schemas import ChatResponse, TokenCount
from jinfer.server.core.endpoint import Endpoint
from jinfer.server.http.http_responses import SSE_MEDIA_TYPE
from jinfer.server.http.query_params import PAGE
from jinfer.server.openai import (
    batches,
    chat,
    completions,
    embeddings,
    files,
    response_schemas,
    responses,
)

_openai = partial(Endpoint, tag="OpenAI")
_stream = partial(_openai, stream_media_type=SSE_MEDIA_TYPE)
_MODEL, _FILE, _BATCH = "{model:path}", "/v1/files/{file_id}", "/v1/batches/{batch_id}"
_RESPONSE = "/v1/responses/{response_id}"

# A path without parameters comes before those whose parameters would match it.
OPENAI_ENDPOINTS: tuple[Endpoint, ...] = (
    _openai(
        "GET /v1/models /models",
        info.models,
        "List the models",
        info.ModelList,
        query=("reload",),
    ),
    _openai(
        f"GET /v1/models/{_MODEL} /models/{_MODEL}",
        info.model,
        "Describe a model",
        info.ModelCard,
    ),
    _stream(
        "POST /v1/chat/completions /chat/completions",
        chat.chat,
        "Answer a conversation",
        ChatResponse,
    ),
    _openai(
        "POST /v1/chat/completions/input_tokens /chat/completions/input_tokens",
        chat.count_tokens,
        "Count the tokens of a conversation",
        TokenCount,
        tag="llama.cpp",
    ),
    _stream(
        "POST /v1/completions /completions",
        completions.completions,
        "Continue texts",
        completions.CompletionResponse,
    ),
    _openai(
        "POST /v1/embeddings /embeddings",
        embeddings.embeddings,
        "Compute the vectors of texts",
        embeddings.EmbeddingResponse,
    ),
    _openai(
        "POST /fill-mask /v1/fill-mask",
        embeddings.fill_mask,
        "Predict the tokens at the masks of texts",
        embeddings.FillMaskResponse,
        tag="vectors",
    ),
    _stream(
        "POST /v1/responses /responses",
        responses.create_response,
        "Answer a conversation",
        response_schemas.ResponseObject,
    ),
    _openai(
        "POST /v1/responses/input_tokens",
        responses.input_tokens,
        "Count the input tokens of a response",
        response_schemas.InputTokens,
    ),
    _stream(
        f"GET {_RESPONSE}",
        responses.retrieve,
        "Retrieve a stored response",
        response_schemas.ResponseObject,
        query=("stream", "starting_after"),
    ),
    _openai(
        f"DELETE {_RESPONSE}",
        responses.delete,
        "Delete a stored response",
        response_schemas.DeletedResponse,
    ),
    _openai(
        f"POST {_RESPONSE}/cancel",
        responses.cancel,
        "Cancel a background response",
        response_schemas.ResponseObject,
    ),
    _openai(
        f"GET {_RESPONSE}/input_items",
        responses.input_items,
        "List the input items of a stored response",
        response_schemas.InputItems,
        query=PAGE,
    ),
    _openai(
        "POST /v1/files",
        files.upload,
        "Upload a file",
        files.FileObject,
        reader=files.receive_upload,
        body_media_type="multipart/form-data",
    ),
    _openai(
        "GET /v1/files",
        files.list_files,
        "List the files",
        files.FileList,
        query=("purpose", *PAGE),
    ),
    _openai(f"GET {_FILE}", files.retrieve_file, "Describe a file", files.FileObject),
    _openai(f"DELETE {_FILE}", files.delete_file, "Delete a file", files.DeletedFile),
    _openai(
        f"GET {_FILE}/content",
        files.file_content,
        "Download a file",
        media_type="application/octet-stream",
    ),
    _openai(
        "POST /v1/batches", batches.create_batch, "Answer a file of requests", batches.BatchObject
    ),
    _openai(
        "GET /v1/batches", batches.list_batches, "List the batches", batches.BatchList, query=PAGE
    ),
    _openai(f"GET {_BATCH}", batches.retrieve_batch, "Retrieve a batch", batches.BatchObject),
    _openai(f"POST {_BATCH}/cancel", batches.cancel_batch, "Cancel a batch", batches.BatchObject),
)

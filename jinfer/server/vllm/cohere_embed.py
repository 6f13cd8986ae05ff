"""Cohere embeddings: /v2/embed."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from jinfer.api import text_embeddings
from jinfer.loader.config.pooling_config import Vectors
from jinfer.server.core.embedder import Embedder, coded_vector, embedder_of, truncate_vectors
from jinfer.server.core.endpoint import Routes
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import invalid_request
from jinfer.server.http.http_responses import HttpResponse, dumps
from jinfer.server.http.schema_base import RequestModel, ResponseModel, rejected_field

routes = Routes(tag="vectors")

VectorType = Literal["float", "base64", "binary", "ubinary"]


class CohereEmbedRequest(RequestModel):
    """A request to /v2/embed."""

    texts: list[str] = Field(min_length=1)
    model: str | None = None
    input_type: str | None = Field(None, description="selects the prompt before each text")
    embedding_types: list[VectorType] | None = Field(None, min_length=1)
    output_dimension: int | None = Field(None, ge=1, description="truncate vectors to this size")
    max_tokens: int | None = Field(None, ge=1, description="maximum tokens of each text")
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None, description="which end of a long text to cut; default: END"
    )
    user: str | None = Field(None, description="is logged")
    images: Annotated[Any, rejected_field("models read text only", [])] = None
    inputs: Annotated[Any, rejected_field("use texts; models read text only", [])] = None
    priority: Annotated[Any, rejected_field("embeddings have no priority", 0)] = None


class CohereVectors(ResponseModel):
    """The vectors by type; binary types pack eight signs into a byte."""

    float: list[list[Any]] | None = None
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereEmbedResponse(ResponseModel):
    """The response of /v2/embed."""

    id: str
    embeddings: CohereVectors
    texts: list[str]
    response_type: Literal["embeddings_by_type"]
    meta: dict[str, Any]


# Cohere's input type -> names of models' prompts for it.
_PROMPTS = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage", "corpus"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}


@routes.add("POST /v2/embed", CohereEmbedResponse)
async def embed(request: RequestContext[CohereEmbedRequest]) -> HttpResponse:
    """Compute the vectors of texts (Cohere)."""
    body = request.body
    max_tokens = -1 if body.max_tokens is None else body.max_tokens
    async with embedder_of(request, None if body.truncate == "NONE" else max_tokens) as embedder:
        name = _prompt_name(request, embedder)
        texts = body.texts
        if body.truncate == "START":
            texts = await request.service.in_thread(_endings, embedder, texts, max_tokens)
        vectors, tokens = await embedder.embed(texts, "texts", name)
        request.note(prompt_tokens=tokens)
        vectors = truncate_vectors(vectors, body.output_dimension, embedder.pooling.normalize)
        shown = {kind: _shown(vectors, kind) for kind in body.embedding_types or ("float",)}
        answer = {
            "id": uuid.uuid4().hex,
            "embeddings": shown,
            "texts": body.texts,
            "response_type": "embeddings_by_type",
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": tokens, "image_tokens": 0},
            },
        }
        return HttpResponse(await request.service.in_thread(dumps, answer))


def _prompt_name(request: RequestContext[CohereEmbedRequest], embedder: Embedder) -> str | None:
    """Return the name of the model's prompt for the input type; report a missing prompt."""
    kind, prompts = request.body.input_type, embedder.pooling.prompts
    if kind is None:
        return None
    name = next((item for item in _PROMPTS.get(kind, (kind,)) if item in prompts), None)
    if name is None and kind in _PROMPTS:
        request.ignore("input_type", "the model has no prompt for it")
    elif name is None:
        known = ", ".join([*_PROMPTS, *prompts])
        raise invalid_request(
            f"Unsupported input_type {kind[:80]!r}; there is: {known}", "input_type"
        )
    return name


def _endings(embedder: Embedder, texts: list[str], max_tokens: int) -> list[str]:
    """Cut the beginnings of long texts. Slow: use a worker thread."""
    session = embedder.model.session
    longest = int(text_embeddings.max_text_tokens(session)) if max_tokens == -1 else max_tokens
    tokenizer, marks = session.tokenizer, len(session.tokenizer.encode(""))
    room = max(1, longest - marks)
    tokens = [tokenizer.encode(text, special=False) for text in texts]
    return [
        text if len(ids) <= room else tokenizer.decode(ids[-room:])
        for text, ids in zip(texts, tokens, strict=True)
    ]


def _shown(vectors: Vectors, kind: str) -> Any:
    """Convert vectors to a type of Cohere's API."""
    if kind == "base64":
        return [coded_vector(row) for row in vectors]
    if kind == "float":
        return [*map(np.ascontiguousarray, vectors)]
    signs = np.packbits(vectors > 0, axis=1)
    return (signs if kind == "ubinary" else signs.astype(np.int16) - 128).tolist()

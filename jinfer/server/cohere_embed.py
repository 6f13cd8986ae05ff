"""Embeddings as Cohere has them: /v2/embed."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np

from jinfer.api import text_embeddings
from jinfer.loader.config.pooling_config import Vectors
from jinfer.server.embeddings import Embedder, coded_vector, embedder_of, truncate_vectors
from jinfer.server.http_errors import invalid_request
from jinfer.server.http_responses import HttpResponse, dumps
from jinfer.server.schemas.cohere_embed import CohereEmbedRequest
from jinfer.server.service import RequestContext

# What clients have to name, and what models call the prompts for it.
_PROMPTS = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage", "corpus"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}


async def embed(call: RequestContext[CohereEmbedRequest]) -> HttpResponse:
    """Handles an embedding request."""
    body = call.body
    most = -1 if body.max_tokens is None else body.max_tokens
    async with embedder_of(call, None if body.truncate == "NONE" else most) as embedder:
        name = _prompt_name(call, embedder)
        texts = body.texts
        if body.truncate == "START":
            texts = await call.service.in_thread(_endings, embedder, texts, most)
        vectors, tokens = await embedder.embed(texts, "texts", name)
        call.note(prompt_tokens=tokens)
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
        return HttpResponse(await call.service.in_thread(dumps, answer))


def _prompt_name(call: RequestContext[CohereEmbedRequest], embedder: Embedder) -> str | None:
    """The model's prompt for what the texts are for; one that it need not have is told."""
    kind, prompts = call.body.input_type, embedder.pooling.prompts
    if kind is None:
        return None
    name = next((one for one in _PROMPTS.get(kind, (kind,)) if one in prompts), None)
    if name is None and kind in _PROMPTS:
        call.ignore("input_type", "the model has no prompt for it")
    elif name is None:
        known = ", ".join([*_PROMPTS, *prompts])
        raise invalid_request(
            f"Unsupported input_type {kind[:80]!r}; there is: {known}", "input_type"
        )
    return name


def _endings(embedder: Embedder, texts: list[str], most: int) -> list[str]:
    """Texts without the beginnings for which there is no room. Slow: use a worker thread."""
    session = embedder.hosted.session
    longest = int(text_embeddings.max_text_tokens(session)) if most == -1 else most
    tokenizer, marks = session.tokenizer, len(session.tokenizer.encode(""))
    room = max(1, longest - marks)
    tokens = [tokenizer.encode(text, special=False) for text in texts]
    return [
        text if len(ids) <= room else tokenizer.decode(ids[-room:])
        for text, ids in zip(texts, tokens, strict=True)
    ]


def _shown(vectors: Vectors, kind: str) -> Any:
    """Vectors in one of Cohere's types."""
    if kind == "base64":
        return [coded_vector(row) for row in vectors]
    if kind == "float":
        return [*map(np.ascontiguousarray, vectors)]
    signs = np.packbits(vectors > 0, axis=1)
    return (signs if kind == "ubinary" else signs.astype(np.int16) - 128).tolist()

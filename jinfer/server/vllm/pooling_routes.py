"""Pooling routes: /classify, and vLLM's /pooling."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
from pydantic import Field

from jinfer.api import text_embeddings
from jinfer.api.classification import TypedTokens, classify
from jinfer.loader.config.classification_config import ClassificationConfig
from jinfer.server.core.embedder import (
    Embedder,
    TaskResponse,
    coded_vector,
    embedder_of,
    truncate_vectors,
    usage_of,
)
from jinfer.server.core.endpoint import Routes
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import invalid_request, unsupported_field
from jinfer.server.http.http_responses import HttpResponse, dumps_list
from jinfer.server.http.schema_base import MixedPrompts, RequestModel, ResponseModel

routes = Routes(tag="vectors")

PoolingTask = Literal["embed", "classify", "token_embed"]


class ClassifyRequest(RequestModel):
    """A request to /classify."""

    input: MixedPrompts
    use_activation: bool | None = Field(None, description="false: raw scores of the head")
    add_special_tokens: bool | None = Field(None, description="false: no special tokens")
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = Field(None, description="is logged")


class TextClass(ResponseModel):
    """The classes of a text."""

    index: int
    label: str = Field(description="label with the highest score")
    probs: list[float] = Field(description="probability of each class")
    num_classes: int


class ClassifyResponse(TaskResponse):
    """The response of /classify, in the order of the texts."""

    labels: list[str] = Field(description="labels, in the order of `probs`")
    data: list[TextClass]


class PoolingRequest(RequestModel):
    """A request to /pooling."""

    input: MixedPrompts
    task: PoolingTask | None = Field(
        None,
        description="default: classes for a model with a classification head, token vectors for a "
        "ColBERT model, else a vector per text",
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, description="truncate vectors to this size")
    normalize: bool | None = None
    use_activation: bool | None = Field(None, description="false: raw scores of the head")
    prompt_name: str | None = Field(
        None, description="name of a model's prompt to put before each text"
    )
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = Field(None, description="is logged")


class PooledText(ResponseModel):
    """The result of a text; as base64: little-endian float32, row by row."""

    index: int
    object: Literal["pooling"]
    data: list[Any] | str


class PoolingResponse(TaskResponse):
    """The response of /pooling, in the order of the texts."""

    data: list[PooledText]


@routes.add("POST /classify /v1/classify", ClassifyResponse)
async def classify_texts(request: RequestContext[ClassifyRequest]) -> HttpResponse:
    """Classify texts."""
    body = request.body
    async with embedder_of(request, body.truncate_prompt_tokens) as embedder:
        config = _classes_of(embedder)
        arguments = body.input, body.use_activation, body.add_special_tokens
        shown, tokens = await _classified(embedder, config, *arguments)
        request.note(prompt_tokens=tokens)
        data = [
            {
                "index": i,
                "label": config.labels[int(np.argmax(row))],
                "probs": row,
                "num_classes": len(config.labels),
            }
            for i, row in enumerate(shown)
        ]
        head = _head("classify", embedder, tokens) | {"labels": config.labels}
        return HttpResponse(await request.service.in_thread(dumps_list, head, "data", data))


def _classes_of(embedder: Embedder) -> ClassificationConfig:
    found = embedder.model.session.opened.classification
    if found is None:
        raise unsupported_field(
            f"the model {embedder.model.name} has no classification head", "model"
        )
    return found


async def _classified(
    embedder: Embedder,
    config: ClassificationConfig,
    texts: Any,
    activate: bool | None,
    special: bool | None = None,
) -> tuple[np.ndarray, int]:
    """Return the probabilities or scores of classes [texts, labels], and the number of tokens."""
    ids = await embedder.service.in_thread(embedder.ids, texts, "input", special=special)
    typed = [TypedTokens(item, [0] * len(item)) for item in ids]
    rows = await embedder.batched(lambda *group: classify(*group).scores, typed)
    scores = np.stack(rows)
    shown = scores if activate is False else config.activated(scores)
    return np.ascontiguousarray(shown, np.float32), sum(map(len, ids))


def _head(kind: str, embedder: Embedder, tokens: int) -> dict[str, Any]:
    """Return the fields before an answer's data."""
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": embedder.model.name,
        "usage": usage_of(tokens),
    }


@routes.add("POST /pooling", PoolingResponse)
async def pooling(request: RequestContext[PoolingRequest]) -> HttpResponse:
    """Compute classes, vectors of texts, or vectors of tokens."""
    body = request.body
    async with embedder_of(request, body.truncate_prompt_tokens) as embedder:
        session = embedder.model.session
        usual: PoolingTask = "token_embed" if embedder.pooling.late else "embed"
        task = body.task or (usual if session.opened.classification is None else "classify")
        if task == "classify" and body.dimensions is not None:
            raise invalid_request("it applies to vectors, not to classes", "dimensions")
        found: Iterable[np.ndarray]
        if task == "classify":
            config = _classes_of(embedder)
            found, tokens = await _classified(embedder, config, body.input, body.use_activation)
        elif task == "embed":
            named = {"normalize": body.normalize}
            found, tokens = await embedder.embed(body.input, "input", body.prompt_name, **named)
        else:
            tokenized = await request.service.in_thread(
                embedder.tokens, body.input, "input", body.prompt_name
            )
            tokens = sum(len(item.ids) for item in tokenized)
            compute = text_embeddings.token_vectors
            found = await embedder.batched(compute, tokenized, normalize=body.normalize)
        request.note(prompt_tokens=tokens)
        if task != "classify":
            own = embedder.pooling.normalize
            unit = own if body.normalize is None else body.normalize
            rows = (np.atleast_2d(item) for item in found)
            cut = [truncate_vectors(row, body.dimensions, unit) for row in rows]
            found = cut if task == "token_embed" else [item[0] for item in cut]
        entries = _entries(found, body.encoding_format == "base64")
        head = _head("pool", embedder, tokens)
        return HttpResponse(await request.service.in_thread(dumps_list, head, "data", entries))


def _entries(found: Iterable[np.ndarray], coded: bool) -> Iterator[dict[str, Any]]:
    """Yield results in the response format: lists of numbers, or base64."""
    for i, item in enumerate(found):
        shown = coded_vector(item) if coded else np.ascontiguousarray(item)
        yield {"index": i, "object": "pooling", "data": shown}

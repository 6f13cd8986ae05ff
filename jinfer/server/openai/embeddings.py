"""Embeddings API: /v1/embeddings and /fill-mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from jinfer.loader.config.pooling_config import Pooling, Vectors
from jinfer.server.core.embedder import (
    ListResponse,
    coded_vector,
    either_field,
    embedder_of,
    truncate_vectors,
    usage_of,
)
from jinfer.server.core.endpoint import Routes
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import (
    ApiError,
    as_api_error,
    invalid_request,
)
from jinfer.server.http.http_responses import HttpResponse, dumps_list
from jinfer.server.http.schema_base import (
    MixedPrompts,
    RequestModel,
    ResponseModel,
    rejected_field,
)
from jinfer.server.models.served_model import ServedModel

routes = Routes(tag="OpenAI")


class TextPart(RequestModel):
    """A part of a text."""

    type: Literal["text", "input_text"]
    text: str


class TextObject(RequestModel):
    """A text in llama.cpp's format."""

    prompt_string: str | None = None
    multimodal_data: Annotated[Any, rejected_field("images have no embeddings here", [])] = None
    content: list[TextPart] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _one_of_both(self) -> TextObject:
        if (self.prompt_string is None) == (self.content is None):
            raise PydanticCustomError("text", "give one of prompt_string and content")
        return self

    @property
    def text(self) -> str:
        """The text."""
        return self.prompt_string or "".join(part.text for part in self.content or ())


NumberType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
EmbeddingInput = MixedPrompts | TextObject | list[str | list[str | int] | TextObject]


class EmbeddingRequest(RequestModel):
    """A request to /v1/embeddings."""

    input: EmbeddingInput | None = None
    content: EmbeddingInput | None = Field(None, description="llama.cpp's name of input")
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: NumberType | None = Field(None, description="number format in base64 (vLLM)")
    endianness: Literal["native", "little", "big"] | None = Field(
        None, description="number format in base64 (vLLM)"
    )
    dimensions: int | None = Field(None, ge=1, description="truncate vectors to this size")
    user: str | None = Field(None, description="is logged")
    truncate_prompt_tokens: int | None = Field(None, description="keeps the first tokens")
    pooling: Pooling | None = None
    normalize: bool | None = None
    use_activation: bool | None = Field(None, description="vLLM's name of normalize")
    prompt_name: str | None = Field(
        None, description="name of a model's prompt to put before each text"
    )


class EmbeddingObject(ResponseModel):
    """The vector of a text; as base64, little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingResponse(ListResponse):
    """The response of /v1/embeddings: vectors in the order of the texts."""

    data: list[EmbeddingObject]


class FillMaskRequest(RequestModel):
    """A request to /fill-mask."""

    input: str | list[str]
    model: str | None = None
    top_k: int | None = Field(None, ge=1, le=1000)
    user: str | None = Field(None, description="is logged")


class MaskToken(ResponseModel):
    """A candidate token for a mask."""

    token: str
    token_id: int
    logprob: float
    probability: float


class MaskText(ResponseModel):
    """The likeliest tokens for each mask of a text."""

    index: int
    object: Literal["fill_mask"]
    masks: list[list[MaskToken]]


class FillMaskResponse(ListResponse):
    """The response of /fill-mask, in the order of the texts."""

    data: list[MaskText]


@routes.add("POST /v1/embeddings /embeddings", EmbeddingResponse)
async def embeddings(request: RequestContext[EmbeddingRequest]) -> HttpResponse:
    """Compute the vectors of texts."""
    body = request.body
    value, param = either_field(body, "input", "content")
    texts = _plain(value)
    normalize = body.normalize
    if body.use_activation is not None:
        if normalize is not None:
            raise invalid_request("it means the same as normalize; leave it out", "use_activation")
        normalize = body.use_activation
    async with embedder_of(request, body.truncate_prompt_tokens) as embedder:
        options: dict[str, Any] = {"pooling": body.pooling, "normalize": normalize}
        vectors, tokens = await embedder.embed(texts, param, body.prompt_name, **options)
        request.note(prompt_tokens=tokens)
        own = embedder.pooling.normalize
        unit = own if normalize is None else normalize
        vectors = truncate_vectors(vectors, body.dimensions, unit)
        head = {"object": "list", "model": embedder.model.name, "usage": usage_of(tokens)}
        coded = None
        if body.encoding_format == "base64":
            coded = partial(coded_vector, kind=body.embed_dtype, big=body.endianness == "big")
        entries = _entries(vectors, coded)
        return HttpResponse(await request.service.in_thread(dumps_list, head, "data", entries))


def _plain(value: Any) -> Any:
    """Convert texts to the format of other routes."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.text if isinstance(value, TextObject) else value


def _entries(
    vectors: Vectors, coded: Callable[[np.ndarray], str] | None
) -> Iterator[dict[str, Any]]:
    """Yield vectors in the response format: lists of numbers, or encoded."""
    for i, row in enumerate(vectors):
        shown = row if coded is None else coded(row)
        yield {"object": "embedding", "index": i, "embedding": shown}


@routes.add("POST /fill-mask /v1/fill-mask", FillMaskResponse, tag="vectors")
async def fill_mask(request: RequestContext[FillMaskRequest]) -> HttpResponse:
    """Predict the tokens at the masks of texts."""
    body = request.body
    async with embedder_of(request, None) as embedder:
        model = embedder.model
        ids = await request.service.in_thread(embedder.ids, body.input, "input")
        data = []
        for index, text in enumerate(ids):
            try:
                masks = await request.service.in_engine_thread(
                    model.llm.fill_mask, text, top=body.top_k or 5
                )
            except ValueError as error:
                raise _no_mask(error, model) from error
            listed = [
                [
                    {
                        "token": token.text,
                        "token_id": token.id,
                        "logprob": token.logprob,
                        "probability": math.exp(token.logprob),
                    }
                    for token in mask
                ]
                for mask in masks
            ]
            data.append({"index": index, "object": "fill_mask", "masks": listed})
        tokens = sum(map(len, ids))
        request.note(prompt_tokens=tokens)
        return HttpResponse(
            {"object": "list", "model": model.name, "data": data, "usage": usage_of(tokens)}
        )


def _no_mask(error: ValueError, model: ServedModel) -> ApiError:
    tokenizer = model.llm.tokenizer
    known = tokenizer is not None and tokenizer.mask_id is not None
    return as_api_error(error, param="input" if known else "model")

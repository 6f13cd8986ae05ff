"""Schemas of embeddings, reranking, scoring and masked language modelling."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from jinfer.opening.pooling_config import Pooling, Similarity
from jinfer.server.schemas.schema_base import Ignored, MixedPrompts, RequestModel, ResponseModel


class EmbeddingRequest(RequestModel):
    """A request to /v1/embeddings."""

    input: MixedPrompts | None = None
    content: MixedPrompts | None = Field(None, description="llama.cpp's name of input")
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, description="only the first so many numbers")
    user: str | None = Field(None, description="is logged")
    truncate_prompt_tokens: int | None = Field(None, description="keeps the first ones")
    pooling: Pooling | None = None
    normalize: bool | None = None
    prompt_name: str | None = Field(None, description="of the model's prompts, before each text")


class EmbeddingUsage(ResponseModel):
    """Token counts of a request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(ResponseModel):
    """The vector of a text; as base64, little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingResponse(ResponseModel):
    """The response of /v1/embeddings: vectors in the order of the texts."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class Document(RequestModel):
    """A text to rank."""

    text: str


class RerankRequest(RequestModel):
    """A request to /v1/rerank."""

    query: str
    documents: list[str | Document] | None = Field(None, min_length=1)
    texts: list[str] | None = Field(
        None, min_length=1, description="TEI's name of documents, which has TEI's answer"
    )
    return_text: bool | None = Field(None, description="TEI's; false if not given")
    raw_scores: Annotated[bool | None, Ignored("scores are as the model compares", (False,))] = None
    truncate: bool | None = Field(None, description="TEI's: longer texts are cut")
    model: str | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = Field(None, description="is logged")


class RankedDocument(ResponseModel):
    """A document with its rank."""

    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RankedText(ResponseModel):
    """A ranked document in the format of TEI (text-embeddings-inference)."""

    index: int
    score: float
    text: str | None = None


class RankedDocuments(ResponseModel):
    """Documents, most relevant first."""

    id: str
    model: str
    usage: EmbeddingUsage
    similarity: Similarity = Field(description="scores compare vectors: no model has read pairs")
    results: list[RankedDocument]


class RerankResponse(RootModel[RankedDocuments | list[RankedText]]):
    """The response of /v1/rerank; a bare list if the request has `texts` (TEI)."""


class ScoreRequest(RequestModel):
    """A request to /score; a single first text is paired with each second one."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = Field(None, description="is logged")


class Score(ResponseModel):
    """The score of a pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(ResponseModel):
    """The response of /score, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    similarity: Similarity = Field(description="scores compare vectors: no model has read pairs")


class ClassifyRequest(RequestModel):
    """A request to /classify."""

    input: str | list[str]
    model: str | None = None


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


class FillMaskResponse(ResponseModel):
    """The response of /fill-mask, in the order of the texts."""

    object: Literal["list"]
    model: str
    data: list[MaskText]
    usage: EmbeddingUsage

"""Embeddings, and what is made of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from jinfer.opening.pooling_config import Pooling, Similarity
from jinfer.server.schemas.schema_base import Answer, Ignored, MixedPrompts, Strict


class EmbeddingRequest(Strict):
    """What is asked of /v1/embeddings."""

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


class EmbeddingUsage(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Answer):
    """The vector of a text; base64: of its little-endian float32 numbers."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(Answer):
    """Vectors in the order of the texts."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Document(Strict):
    """A text to be ranked."""

    text: str


class RerankRequest(Strict):
    """What is asked of /v1/rerank."""

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


class RankedDocument(Answer):
    """A document's place."""

    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RankedText(Answer):
    """The same in the words of TEI (text-embeddings-inference)."""

    index: int
    score: float
    text: str | None = None


class RankedDocuments(Answer):
    """The documents, those that fit best first."""

    id: str
    model: str
    usage: EmbeddingUsage
    similarity: Similarity = Field(description="scores compare vectors: no model has read pairs")
    results: list[RankedDocument]


class RerankAnswer(RootModel[RankedDocuments | list[RankedText]]):
    """The documents, those that fit best first; a bare list where `texts` were sent."""


class ScoreRequest(Strict):
    """How well pairs of texts fit; one first text is paired with each second one."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = Field(None, description="is logged")


class Score(Answer):
    """Of a pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(Answer):
    """Scores in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    similarity: Similarity = Field(description="scores compare vectors: no model has read pairs")


class ClassifyRequest(Strict):
    """Texts to be put into classes."""

    input: str | list[str]
    model: str | None = None


class MaskRequest(Strict):
    """Texts with masks in them."""

    input: str | list[str]
    model: str | None = None
    top_k: int | None = Field(None, ge=1, le=1000)
    user: str | None = Field(None, description="is logged")


class MaskToken(Answer):
    """What may stand at a mask."""

    token: str
    token_id: int
    logprob: float
    probability: float


class MaskText(Answer):
    """For each mask of a text, the likeliest tokens."""

    index: int
    object: Literal["fill_mask"]
    masks: list[list[MaskToken]]


class MaskAnswer(Answer):
    """Texts in their order."""

    object: Literal["list"]
    model: str
    data: list[MaskText]
    usage: EmbeddingUsage

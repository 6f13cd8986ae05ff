"""Schemas of reranking and scoring."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from jinfer.modelspec.model_spec import Activation
from jinfer.opening.pooling_config import Similarity
from jinfer.server.schemas.embeddings import EmbeddingUsage
from jinfer.server.schemas.schema_base import RequestModel, ResponseModel

Texts = Annotated[list[str], Field(min_length=1)]
Compared = Similarity | Literal["maxsim", "head"]
_HOW = "how a score came to be: vectors compared, MaxSim of tokens' vectors, or a head's"


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
    raw_scores: bool | None = Field(None, description="TEI's: a head's scores as they are")
    use_activation: bool | None = Field(None, description="vLLM's: false as raw_scores = true")
    truncate: bool | None = Field(None, description="TEI's: longer texts are cut")
    model: str | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = Field(None, ge=1, description="Cohere's: documents are cut")
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
    similarity: Compared = Field(description=_HOW)
    activation: Activation | None = Field(None, description="what was applied to a head's score")
    results: list[RankedDocument]


class RerankResponse(RootModel[RankedDocuments | list[RankedText]]):
    """The response of /v1/rerank; a bare list if the request has `texts` (TEI)."""


class ScoreRequest(RequestModel):
    """A request to /score; a single first text is paired with each second one."""

    text_1: str | Texts | None = None
    queries: str | Texts | None = Field(None, description="another name of text_1")
    data_1: str | Texts | None = Field(None, description="another name of text_1")
    text_2: str | Texts | None = None
    documents: str | Texts | None = Field(None, description="another name of text_2")
    items: str | Texts | None = Field(None, description="another name of text_2")
    data_2: str | Texts | None = Field(None, description="another name of text_2")
    use_activation: bool | None = Field(None, description="false: a head's scores as they are")
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
    similarity: Compared = Field(description=_HOW)
    activation: Activation | None = Field(None, description="what was applied to a head's score")

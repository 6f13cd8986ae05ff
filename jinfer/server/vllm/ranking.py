"""Ranking: /rerank and /score, by a head that reads pairs or by comparing vectors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, RootModel

from jinfer.api import text_embeddings
from jinfer.api.classification import TypedTokens, classify, tokenize_pair
from jinfer.api.session import Session
from jinfer.loader.config.classification_config import ClassificationConfig
from jinfer.loader.config.pooling_config import Similarity
from jinfer.modelspec.model_spec import Activation
from jinfer.server.core.embedder import (
    Embedder,
    EmbeddingUsage,
    TaskResponse,
    either_field,
    embedder_of,
    usage_of,
)
from jinfer.server.core.endpoint import Routes
from jinfer.server.core.service import RequestContext
from jinfer.server.http.http_errors import invalid_request, unsupported_field
from jinfer.server.http.http_responses import HttpResponse
from jinfer.server.http.schema_base import RequestModel, ResponseModel

routes = Routes(tag="vectors")

Texts = Annotated[list[str], Field(min_length=1)]
Compared = Similarity | Literal["maxsim", "head"]
_HOW = "method of the score: similarity of vectors, MaxSim of token vectors, or a head"


class Document(RequestModel):
    """A text to rank."""

    text: str


class RerankRequest(RequestModel):
    """A request to /v1/rerank."""

    query: str
    documents: list[str | Document] | None = Field(None, min_length=1)
    texts: list[str] | None = Field(
        None, min_length=1, description="TEI's name of documents; selects TEI's response format"
    )
    return_text: bool | None = Field(None, description="TEI's; default: false")
    raw_scores: bool | None = Field(None, description="TEI's: raw scores of a head")
    use_activation: bool | None = Field(None, description="vLLM's: false means raw_scores = true")
    truncate: bool | None = Field(None, description="TEI's: truncate long texts")
    model: str | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = Field(None, ge=1, description="Cohere's: truncate documents")
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
    activation: Activation | None = Field(None, description="activation of a head's score")
    results: list[RankedDocument]


class RerankResponse(RootModel[RankedDocuments | list[RankedText]]):
    """The response of /v1/rerank; a bare list if the request has `texts` (TEI)."""


class ScoreRequest(RequestModel):
    """A request to /score; a single first text is paired with each second text."""

    text_1: str | Texts | None = None
    queries: str | Texts | None = Field(None, description="another name of text_1")
    data_1: str | Texts | None = Field(None, description="another name of text_1")
    text_2: str | Texts | None = None
    documents: str | Texts | None = Field(None, description="another name of text_2")
    items: str | Texts | None = Field(None, description="another name of text_2")
    data_2: str | Texts | None = Field(None, description="another name of text_2")
    use_activation: bool | None = Field(None, description="false: raw scores of a head")
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = Field(None, description="is logged")


class Score(ResponseModel):
    """The score of a pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(TaskResponse):
    """The response of /score, in the order of the pairs."""

    data: list[Score]
    similarity: Compared = Field(description=_HOW)
    activation: Activation | None = Field(None, description="activation of a head's score")


_QUERY, _DOCUMENT = ("query",), ("document", "passage", "corpus")


@dataclass(frozen=True)
class PairScores:
    """Scores of pairs of texts.

    Attributes:
        scores: score of each pair; larger is more similar.
        tokens: number of input tokens.
        how: fields of the response that describe the method.
    """

    scores: list[float]
    tokens: int
    how: dict[str, Any]


@routes.add("POST /v1/rerank /rerank /v2/rerank", RerankResponse)
async def rerank(request: RequestContext[RerankRequest]) -> HttpResponse:
    """Rank documents by a query."""
    body = request.body
    documents, param = either_field(body, "documents", "texts")
    texts = [
        document.text if isinstance(document, Document) else document for document in documents
    ]
    truncate = -1 if body.truncate else body.truncate_prompt_tokens
    async with embedder_of(request, truncate) as embedder:
        read = texts
        if body.max_tokens_per_doc is not None:
            read = await request.service.in_thread(
                _shortened, embedder.model.session, texts, body.max_tokens_per_doc
            )
        raw = body.raw_scores is True or body.use_activation is False
        if body.raw_scores and embedder.model.session.opened.classification is None:
            request.ignore("raw_scores", "the model has no raw scores")
        sides = (body.query, "query", _QUERY), (read, param, _DOCUMENT)
        found = await pair_scores(embedder, *sides, raw=raw)
        request.note(prompt_tokens=found.tokens)
        scores = found.scores
        order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n]
        if param == "texts":
            texts_shown = [{"text": text} if body.return_text else {} for text in texts]
            return HttpResponse([{"index": i, "score": scores[i], **texts_shown[i]} for i in order])
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
        if body.return_documents is not False:
            for result in results:
                result["document"] = {"text": texts[result["index"]]}
        return HttpResponse(
            {
                "id": f"rerank-{uuid.uuid4().hex}",
                "model": embedder.model.name,
                "usage": usage_of(found.tokens),
                **found.how,
                "results": results,
            }
        )


def _shortened(session: Session, texts: Sequence[str], max_tokens: int) -> list[str]:
    """Truncate texts to `max_tokens` tokens. Slow: use a worker thread."""
    tokenizer = session.tokenizer
    tokens = [tokenizer.encode(text, special=False) for text in texts]
    return [
        text if len(ids) <= max_tokens else tokenizer.decode(ids[:max_tokens])
        for text, ids in zip(texts, tokens, strict=True)
    ]


@routes.add("POST /score /v1/score", ScoreResponse)
async def score(request: RequestContext[ScoreRequest]) -> HttpResponse:
    """Score pairs of texts."""
    body = request.body
    item, param = either_field(body, "text_1", "queries", "data_1")
    other, other_param = either_field(body, "text_2", "documents", "items", "data_2")
    first, second = ([side] if isinstance(side, str) else side for side in (item, other))
    if len(first) not in (1, len(second)):
        raise invalid_request(
            f"there are {len(first)} first texts and {len(second)} second texts", param
        )
    async with embedder_of(request, body.truncate_prompt_tokens) as embedder:
        late = embedder.pooling.late
        sides = (
            (first, param, _QUERY if late else ()),
            (second, other_param, _DOCUMENT if late else ()),
        )
        found = await pair_scores(embedder, *sides, raw=body.use_activation is False)
        request.note(prompt_tokens=found.tokens)
        data = [{"index": i, "object": "score", "score": n} for i, n in enumerate(found.scores)]
        return HttpResponse(
            {
                "id": f"score-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": embedder.model.name,
                "data": data,
                "usage": usage_of(found.tokens),
                **found.how,
            }
        )


# Texts, their request field, and names of possible prompts.
type _Side = tuple[str | Sequence[str], str, Sequence[str]]


async def pair_scores(embedder: Embedder, first: _Side, second: _Side, *, raw: bool) -> PairScores:
    """Score pairs; a single first text is paired with each second text.

    Args:
        raw: whether to return raw scores of a head.

    Raises:
        ApiError: the model was not trained to compare texts.
    """
    session = embedder.model.session
    config = session.opened.classification
    if config is not None:
        return await _by_head(embedder, config, first, second, raw)
    if embedder.model.llm.spec.generates and not embedder.pooling.declared:
        raise unsupported_field(
            f"the model {embedder.model.name} generates text, and is not declared to have "
            "comparable vectors; serve an embedder or a reranker, and use its name",
            "model",
        )
    if embedder.pooling.late:
        return await _by_token_vectors(embedder, first, second)
    (left, some), (right, more) = [
        await embedder.embed(texts, param, _prompt(embedder, names))
        for texts, param, names in (first, second)
    ]
    similarity = embedder.pooling.similarity
    scores = text_embeddings.SIMILARITIES[similarity](left, right).tolist()
    return PairScores(scores, some + more, {"similarity": similarity})


def _prompt(embedder: Embedder, names: Sequence[str]) -> str | None:
    return next((name for name in names if name in embedder.pooling.prompts), None)


async def _by_head(
    embedder: Embedder, config: ClassificationConfig, first: _Side, second: _Side, raw: bool
) -> PairScores:
    """Score pairs with a cross-encoder, which reads both texts at once."""
    if config.relevance is None:
        raise unsupported_field(
            f"the model {embedder.model.name} has {len(config.labels)} classes, and none is "
            "marked as relevance; use /classify, or set classification.relevance",
            "model",
        )
    pairs = await embedder.service.in_thread(_pairs, embedder, first, second)
    rows = await embedder.batched(lambda *pairs_: classify(*pairs_).scores, pairs)
    scores = np.stack(rows)
    found = scores if raw else config.activated(scores)
    how = {"similarity": "head", "activation": "identity" if raw else config.activation}
    tokens = sum(len(pair.ids) for pair in pairs)
    return PairScores(found[:, config.relevance].tolist(), tokens, how)


def _pairs(embedder: Embedder, first: _Side, second: _Side) -> list[TypedTokens]:
    """Tokenize pairs and check their lengths. Slow: use a worker thread."""
    left, right = ([item[0]] if isinstance(item[0], str) else item[0] for item in (first, second))
    if len(right) > embedder.service.settings.max_prompts:
        max_texts = embedder.service.settings.max_prompts
        raise invalid_request(
            f"there are {len(right)} texts; a request may have {max_texts}", second[1]
        )
    found = []
    for number, other in enumerate(right):
        item = left[0] if len(left) == 1 else left[number]
        pair = tokenize_pair(embedder.model.session, item, other)
        ids = embedder.fitting(number, pair.ids, second[1])
        found.append(TypedTokens(ids, pair.cut(len(ids)).types))
    return found


async def _by_token_vectors(embedder: Embedder, first: _Side, second: _Side) -> PairScores:
    """Score pairs by late interaction (MaxSim)."""
    sides, tokens = [], 0
    for texts, param, names in (first, second):
        name = _prompt(embedder, names)
        tokenized = await embedder.service.in_thread(embedder.tokens, texts, param, name)
        vectors = await embedder.batched(text_embeddings.token_vectors, tokenized)
        tokens += sum(len(item.ids) for item in tokenized)
        sides.append((tokenized, vectors))
    (_, queries), (read, documents) = sides
    ignored = embedder.skipped_ids()
    kept = [
        vectors[[i for i, id in enumerate(item.ids) if id not in ignored]]
        for item, vectors in zip(read, documents, strict=True)
    ]
    queries = queries * len(kept) if len(queries) == 1 else queries
    scores = [
        text_embeddings.max_similarity(query, document) if len(document) else 0.0
        for query, document in zip(queries, kept, strict=True)
    ]
    return PairScores(scores, tokens, {"similarity": "maxsim"})

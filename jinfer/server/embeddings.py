"""Embeddings API: /v1/embeddings, and /rerank, /score and /fill-mask, which build on it."""

from __future__ import annotations

import base64
import contextlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel

from jinfer.api import text_embeddings
from jinfer.engine.requests import RequestError
from jinfer.opening.pooling_config import PoolingSpec, Vectors
from jinfer.server.http_errors import (
    ApiError,
    as_api_error,
    context_exceeded,
    invalid_request,
    unsupported_field,
)
from jinfer.server.http_responses import HttpResponse, dumps_list
from jinfer.server.model_manager import ServedModel
from jinfer.server.prompt_builder import is_single_prompt, prompt_ids
from jinfer.server.schemas import embeddings as schemas
from jinfer.server.service import RequestContext, Service


async def embeddings(call: RequestContext[schemas.EmbeddingRequest]) -> HttpResponse:
    """Handles an embedding request."""
    body = call.body
    texts, param = _either_field(body, "input", "content")
    async with _embedder(call, body.truncate_prompt_tokens) as embedder:
        options = {"pooling": body.pooling, "normalize": body.normalize}
        vectors, tokens = await embedder.embed(texts, param, body.prompt_name, **options)
        call.note(prompt_tokens=tokens)
        own = embedder.pooling.normalize
        unit = own if body.normalize is None else body.normalize
        vectors = _truncate_vectors(vectors, body.dimensions, unit)
        head = {"object": "list", "model": embedder.hosted.name, "usage": _usage(tokens)}
        coded = body.encoding_format == "base64"
        return HttpResponse(
            await call.service.in_thread(dumps_list, head, "data", _entries(vectors, coded))
        )


def _either_field(body: BaseModel, *names: str) -> tuple[Any, str]:
    """The one field of several that is set, and its name. Raises `ApiError`."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise invalid_request(f"give one of {' and '.join(names)}", names[0])
    return getattr(body, given[0]), given[0]


def _entries(vectors: Vectors, texts: bool) -> Iterator[dict[str, Any]]:
    """Vectors in the response format: lists of numbers, or base64."""
    for i, row in enumerate(vectors):
        shown = base64.b64encode(row.astype("<f4").tobytes()).decode() if texts else row
        yield {"object": "embedding", "index": i, "embedding": shown}


def _truncate_vectors(vectors: Vectors, dimensions: int | None, unit: bool) -> Vectors:
    """Truncates vectors to their first dimensions (Matryoshka), renormalized where they were."""
    if dimensions is None:
        return vectors
    width = vectors.shape[1]
    if dimensions > width:
        raise invalid_request(f"the model's vectors have {width} numbers", "dimensions")
    cut = np.ascontiguousarray(vectors[:, :dimensions])
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return cut / np.maximum(lengths, 1e-12) if unit else cut


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


@dataclass(frozen=True)
class _Embedder:
    """Embeds the texts of a request with its model, which stays loaded meanwhile.

    Attributes:
        truncate: tokens that a text is truncated to; -1: as many as fit; None: none is truncated.
    """

    service: Service
    hosted: ServedModel
    truncate: int | None

    @property
    def pooling(self) -> PoolingSpec:
        """How the model makes vectors."""
        return self.hosted.session.opened.pooling

    async def embed(
        self, texts: str | Sequence[Any], param: str, prompt_name: str | None, **options: Any
    ) -> tuple[Vectors, int]:
        """Embeds texts in batches. Returns the vectors and the number of tokens."""
        given = await self.service.in_thread(self._tokens, texts, param, prompt_name)
        # Texts of similar length are batched together, so that little padding is computed.
        order = sorted(range(len(given)), key=lambda i: len(given[i].ids))
        session = self.hosted.session
        most = session.engine.scheduler.slots
        rows: dict[int, np.ndarray] = {}
        for begin in range(0, len(order), most):
            group = [given[i] for i in order[begin : begin + most]]
            found = await self.service.in_engine_thread(
                text_embeddings.embed_texts, session, group, **options
            )
            rows.update(zip(order[begin : begin + most], found, strict=True))
        return np.stack([rows[i] for i in range(len(given))]), sum(len(one.ids) for one in given)

    def _tokens(
        self, texts: str | Sequence[Any], param: str, prompt_name: str | None
    ) -> list[text_embeddings.EmbeddingTokens]:
        """Tokenizes texts, each after the model's prompt of that name. Slow: use a thread."""
        try:
            prompt, skipped = text_embeddings.embedding_prompt(self.hosted.session, prompt_name)
        except RequestError as error:
            raise as_api_error(error, param="prompt_name") from error
        listed = [texts] if is_single_prompt(texts) else [*texts]
        are_texts = [isinstance(one, str) for one in listed]
        if prompt_name is not None and not all(are_texts):
            raise invalid_request("it is for texts, not for token ids", "prompt_name")
        worded = [self.pooling.text(one, prompt) if isinstance(one, str) else one for one in listed]
        found = self.ids(worded, param)
        counts = [skipped if one else 0 for one in are_texts]
        return [
            text_embeddings.EmbeddingTokens(ids, min(count, len(ids) - 1))
            for ids, count in zip(found, counts, strict=True)
        ]

    def ids(self, texts: str | Sequence[Any], param: str) -> list[list[int]]:
        """Tokenizes texts and checks their lengths. Slow: use a worker thread."""
        session = self.hosted.session
        if session.engine.model.has_cross_attention:
            raise unsupported_field("an encoder-decoder gives no vectors of texts", "model")
        listed = prompt_ids(texts, session, self.service.settings.max_prompts, param=param)
        longest = text_embeddings.max_text_tokens(session)
        if self.truncate is not None:
            if self.truncate < -1 or self.truncate == 0:
                raise invalid_request("it must be -1 or at least 1", "truncate_prompt_tokens")
            most = longest if self.truncate == -1 else self.truncate
            # The last token stays: it may be an end token.
            listed = [ids if len(ids) <= most else [*ids[: most - 1], ids[-1]] for ids in listed]
        for number, ids in enumerate(listed):
            if not ids:
                raise invalid_request(f"text {number} is empty; give at least one token", param)
            if len(ids) > longest:
                advice = "shorten it, or set truncate_prompt_tokens"
                raise context_exceeded(f"text {number}", len(ids), int(longest), advice, param)
        return listed

    async def similarities(
        self,
        texts: tuple[Sequence[str], Sequence[str]],
        params: tuple[str, str],
        *prompts: Sequence[str],
    ) -> tuple[list[float], int]:
        """The similarity of pairs of texts, and the number of tokens.

        Args:
            prompts: of the first and of the second texts, names of prompts of which the model may
                have one.

        Raises:
            ApiError: the model was not trained to compare texts.
        """
        if self.hosted.llm.spec.generates and not self.pooling.declared:
            raise unsupported_field(
                f"the model {self.hosted.name} writes texts, and nothing says that its vectors can "
                f"be compared; serve an embedder beside it and name that",
                "model",
            )
        (left, some), (right, more) = [
            await self.embed(
                [*given], param, next((one for one in names if one in self.pooling.prompts), None)
            )
            for given, param, names in zip(texts, params, prompts or ((), ()), strict=True)
        ]
        compare = text_embeddings.SIMILARITIES[self.pooling.similarity]
        return compare(left, right).tolist(), some + more


@contextlib.asynccontextmanager
async def _embedder(call: RequestContext[Any], truncate: int | None) -> AsyncIterator[_Embedder]:
    call.note(user=call.body.user)
    async with call.service.models.use(call.body.model) as hosted:
        call.note(model=hosted.name)
        yield _Embedder(call.service, hosted, truncate)


async def rerank(call: RequestContext[schemas.RerankRequest]) -> HttpResponse:
    """Ranks documents by their similarity to a query."""
    body = call.body
    documents, param = _either_field(body, "documents", "texts")
    texts = [one.text if isinstance(one, schemas.Document) else one for one in documents]
    truncate = -1 if body.truncate else body.truncate_prompt_tokens
    async with _embedder(call, truncate) as embedder:
        prompts = ["query"], ["document", "passage", "corpus"]
        pairs, params = ([body.query], texts), ("query", param)
        scores, tokens = await embedder.similarities(pairs, params, *prompts)
        call.note(prompt_tokens=tokens)
        order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n]
        if param == "texts":
            said = [{"text": text} if body.return_text else {} for text in texts]
            return HttpResponse([{"index": i, "score": scores[i], **said[i]} for i in order])
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
        if body.return_documents is not False:
            for one in results:
                one["document"] = {"text": texts[one["index"]]}
        return HttpResponse(
            {
                "id": f"rerank-{uuid.uuid4().hex}",
                "model": embedder.hosted.name,
                "usage": _usage(tokens),
                "similarity": embedder.pooling.similarity,
                "results": results,
            }
        )


async def score(call: RequestContext[schemas.ScoreRequest]) -> HttpResponse:
    """Scores the similarity of pairs of texts."""
    body = call.body
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) not in (1, len(second)):
        raise invalid_request(
            f"there are {len(first)} first texts and {len(second)} second ones", "text_1"
        )
    async with _embedder(call, body.truncate_prompt_tokens) as embedder:
        scores, tokens = await embedder.similarities((first, second), ("text_1", "text_2"))
        call.note(prompt_tokens=tokens)
        data = [{"index": i, "object": "score", "score": one} for i, one in enumerate(scores)]
        return HttpResponse(
            {
                "id": f"score-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": embedder.hosted.name,
                "data": data,
                "usage": _usage(tokens),
                "similarity": embedder.pooling.similarity,
            }
        )


async def classify(call: RequestContext[schemas.ClassifyRequest]) -> HttpResponse:
    """Rejects classification: no family has a classification head."""
    hosted = call.service.models.find(call.body.model)
    message = f"the model {hosted.name} has no head that puts texts into classes"
    raise ApiError(501, message, param="model", code="not_supported")


async def fill_mask(call: RequestContext[schemas.FillMaskRequest]) -> HttpResponse:
    """Predicts the likeliest tokens at the masks of texts (masked language modelling)."""
    body = call.body
    async with _embedder(call, None) as embedder:
        hosted = embedder.hosted
        ids = await call.service.in_thread(embedder.ids, body.input, "input")
        data = []
        for index, text in enumerate(ids):
            try:
                masks = await call.service.in_engine_thread(
                    hosted.llm.fill_mask, text, top=body.top_k or 5
                )
            except ValueError as error:
                raise _no_mask(error, hosted) from error
            listed = [
                [
                    {
                        "token": one.text,
                        "token_id": one.id,
                        "logprob": one.logprob,
                        "probability": math.exp(one.logprob),
                    }
                    for one in mask
                ]
                for mask in masks
            ]
            data.append({"index": index, "object": "fill_mask", "masks": listed})
        tokens = sum(map(len, ids))
        call.note(prompt_tokens=tokens)
        return HttpResponse(
            {"object": "list", "model": hosted.name, "data": data, "usage": _usage(tokens)}
        )


def _no_mask(error: ValueError, hosted: ServedModel) -> ApiError:
    tokenizer = hosted.llm.tokenizer
    known = tokenizer is not None and tokenizer.mask_id is not None
    return as_api_error(error, param="input" if known else "model")

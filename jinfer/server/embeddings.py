"""Embeddings API: /v1/embeddings and /fill-mask, and how other routes compute texts in batches."""

from __future__ import annotations

import base64
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from pydantic import BaseModel

from jinfer.api import text_embeddings
from jinfer.engine.requests import RequestError
from jinfer.opening.pooling_config import PoolingSpec, Vectors, cut
from jinfer.server.http_errors import (
    ApiError,
    as_api_error,
    context_exceeded,
    invalid_request,
    unsupported_field,
)
from jinfer.server.http_responses import HttpResponse, dumps_list
from jinfer.server.prompt_builder import is_single_prompt, prompt_ids
from jinfer.server.schemas import embeddings as schemas
from jinfer.server.served_model import ServedModel
from jinfer.server.service import RequestContext, Service


async def embeddings(call: RequestContext[schemas.EmbeddingRequest]) -> HttpResponse:
    """Handles an embedding request."""
    body = call.body
    given, param = either_field(body, "input", "content")
    texts = _plain(given)
    wanted = body.normalize
    if body.use_activation is not None:
        if wanted is not None:
            raise invalid_request("it says the same as normalize; leave it out", "use_activation")
        wanted = body.use_activation
    async with embedder_of(call, body.truncate_prompt_tokens) as embedder:
        options: dict[str, Any] = {"pooling": body.pooling, "normalize": wanted}
        vectors, tokens = await embedder.embed(texts, param, body.prompt_name, **options)
        call.note(prompt_tokens=tokens)
        own = embedder.pooling.normalize
        unit = own if wanted is None else wanted
        vectors = truncate_vectors(vectors, body.dimensions, unit)
        head = {"object": "list", "model": embedder.hosted.name, "usage": usage_of(tokens)}
        coded = None
        if body.encoding_format == "base64":
            coded = partial(coded_vector, kind=body.embed_dtype, big=body.endianness == "big")
        entries = _entries(vectors, coded)
        return HttpResponse(await call.service.in_thread(dumps_list, head, "data", entries))


def _plain(given: Any) -> Any:
    """Texts as other routes have them."""
    if isinstance(given, list):
        return [_plain(one) for one in given]
    return given.text if isinstance(given, schemas.TextObject) else given


def either_field(body: BaseModel, *names: str) -> tuple[Any, str]:
    """The one field of several that is set, and its name. Raises `ApiError`."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise invalid_request(f"give one of {' and '.join(names)}", names[0])
    return getattr(body, given[0]), given[0]


# vLLM's names of types of numbers.
_TYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


def coded_vector(vector: np.ndarray, kind: str | None = None, big: bool = False) -> str:
    """Numbers in base64; by default little-endian float32."""
    numbers = vector.astype(_TYPES[kind or "float32"])
    raw = numbers.view(f"u{numbers.itemsize}")
    return base64.b64encode(raw.astype(f"{'>' if big else '<'}u{raw.itemsize}").tobytes()).decode()


def _entries(
    vectors: Vectors, coded: Callable[[np.ndarray], str] | None
) -> Iterator[dict[str, Any]]:
    """Vectors in the response format: lists of numbers, or as they are coded."""
    for i, row in enumerate(vectors):
        shown = row if coded is None else coded(row)
        yield {"object": "embedding", "index": i, "embedding": shown}


def truncate_vectors(vectors: Vectors, dimensions: int | None, unit: bool) -> Vectors:
    """Truncates vectors to their first dimensions (Matryoshka), renormalized where they were."""
    if dimensions is None:
        return vectors
    width = vectors.shape[1]
    if dimensions > width:
        raise invalid_request(f"the model's vectors have {width} numbers", "dimensions")
    cut = np.ascontiguousarray(vectors[:, :dimensions])
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return cut / np.maximum(lengths, 1e-12) if unit else cut


def usage_of(tokens: int) -> dict[str, int]:
    """The usage of a request that writes nothing."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}


@dataclass(frozen=True)
class Embedder:
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
        given = await self.service.in_thread(self.tokens, texts, param, prompt_name)
        rows = await self.batched(text_embeddings.embed_texts, given, **options)
        return np.stack(rows), sum(len(one.ids) for one in given)

    def skipped_ids(self) -> frozenset[int]:
        """The tokens of documents that late interaction leaves out."""
        found = map(self.hosted.session.tokenizer.id, self.pooling.skipped)
        return frozenset(id for id in found if id is not None)

    async def batched(
        self, compute: Callable[..., Iterable[Any]], given: Sequence[Any], **options: Any
    ) -> list[Any]:
        """What `compute(session, group, ...)` gives for each text, by groups of similar length.

        Args:
            given: texts with `ids`.
        """
        # Texts of similar length are batched together, so that little padding is computed.
        order = sorted(range(len(given)), key=lambda i: len(given[i].ids))
        session = self.hosted.session
        most = session.engine.scheduler.slots
        rows: dict[int, Any] = {}
        for begin in range(0, len(order), most):
            group = [given[i] for i in order[begin : begin + most]]
            found = await self.service.in_engine_thread(compute, session, group, **options)
            rows.update(zip(order[begin : begin + most], found, strict=True))
        return [rows[i] for i in range(len(given))]

    def tokens(
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

    def ids(
        self, texts: str | Sequence[Any], param: str, *, special: bool | None = None
    ) -> list[list[int]]:
        """Tokenizes texts and checks their lengths. Slow: use a worker thread."""
        session = self.hosted.session
        if session.engine.runner.model.has_cross_attention:
            raise unsupported_field("an encoder-decoder gives no vectors of texts", "model")
        most = self.service.settings.max_prompts
        listed = prompt_ids(texts, session, most, special=special, param=param)
        return [self.fitting(number, ids, param) for number, ids in enumerate(listed)]

    def fitting(self, number: int, ids: list[int], param: str) -> list[int]:
        """A text's tokens, truncated if that is asked for. Raises `ApiError` if they do not fit."""
        longest = text_embeddings.max_text_tokens(self.hosted.session)
        if self.truncate is not None:
            if not (self.truncate == -1 or 1 <= self.truncate <= longest):
                raise invalid_request(
                    f"it must be -1, or from 1 to {int(longest)}, what a text may have",
                    "truncate_prompt_tokens",
                )
            ids = cut(ids, longest if self.truncate == -1 else self.truncate)
        if not ids:
            raise invalid_request(f"text {number} is empty; give at least one token", param)
        if len(ids) > longest:
            advice = "shorten it, or set truncate_prompt_tokens"
            raise context_exceeded(f"text {number}", len(ids), int(longest), advice, param)
        return ids


@contextlib.asynccontextmanager
async def embedder_of(call: RequestContext[Any], truncate: int | None) -> AsyncIterator[Embedder]:
    """What computes a request's texts with its model. Raises `ApiError` for an unknown model."""
    call.note(user=call.body.user)
    async with call.service.models.use(call.body.model) as hosted:
        call.note(model=hosted.name)
        yield Embedder(call.service, hosted, truncate)


async def fill_mask(call: RequestContext[schemas.FillMaskRequest]) -> HttpResponse:
    """Predicts the likeliest tokens at the masks of texts (masked language modelling)."""
    body = call.body
    async with embedder_of(call, None) as embedder:
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
            {"object": "list", "model": hosted.name, "data": data, "usage": usage_of(tokens)}
        )


def _no_mask(error: ValueError, hosted: ServedModel) -> ApiError:
    tokenizer = hosted.llm.tokenizer
    known = tokenizer is not None and tokenizer.mask_id is not None
    return as_api_error(error, param="input" if known else "model")

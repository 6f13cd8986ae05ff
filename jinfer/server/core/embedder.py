"""Embedder: computes the vectors of a request's texts, for the routes of all dialects."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from pydantic import BaseModel

from jinfer.api import text_embeddings
from jinfer.engine.requests import RequestError
from jinfer.loader.config.pooling_config import PoolingSpec, Vectors, cut
from jinfer.server.core.prompt_builder import is_single_prompt, prompt_ids
from jinfer.server.core.service import RequestContext, Service
from jinfer.server.http.http_errors import (
    as_api_error,
    context_exceeded,
    invalid_request,
    unsupported_field,
)
from jinfer.server.http.schema_base import ResponseModel
from jinfer.server.models.served_model import ServedModel


class EmbeddingUsage(ResponseModel):
    """Token counts of a request."""

    prompt_tokens: int
    total_tokens: int


class ListResponse(ResponseModel):
    """Results of texts, in their order."""

    object: Literal["list"]
    model: str
    usage: EmbeddingUsage


class TaskResponse(ListResponse):
    """As vLLM has them."""

    id: str
    created: int


def either_field(body: BaseModel, *names: str) -> tuple[Any, str]:
    """Return the only field that is set, and its name. Raises `ApiError`."""
    set_names = [name for name in names if getattr(body, name) is not None]
    if len(set_names) != 1:
        raise invalid_request(f"give one of {' and '.join(names)}", names[0])
    return getattr(body, set_names[0]), set_names[0]


# vLLM's names of number types.
_TYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


def coded_vector(vector: np.ndarray, kind: str | None = None, big: bool = False) -> str:
    """Encode numbers in base64, by default as little-endian float32."""
    numbers = vector.astype(_TYPES[kind or "float32"])
    raw = numbers.view(f"u{numbers.itemsize}")
    return base64.b64encode(raw.astype(f"{'>' if big else '<'}u{raw.itemsize}").tobytes()).decode()


def truncate_vectors(vectors: Vectors, dimensions: int | None, unit: bool) -> Vectors:
    """Truncate vectors to their first dimensions (Matryoshka), and renormalize unit vectors."""
    if dimensions is None:
        return vectors
    width = vectors.shape[1]
    if dimensions > width:
        raise invalid_request(f"the model's vectors have {width} numbers", "dimensions")
    cut = np.ascontiguousarray(vectors[:, :dimensions])
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return cut / np.maximum(lengths, 1e-12) if unit else cut


def usage_of(tokens: int) -> dict[str, int]:
    """Return the usage of a request without new tokens."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}


@dataclass(frozen=True)
class Embedder:
    """Embeds the texts of a request with its model, which stays loaded meanwhile.

    Attributes:
        truncate: maximum number of tokens of a text; -1: the model's maximum; None: longer texts
            are an error.
    """

    service: Service
    model: ServedModel
    truncate: int | None

    @property
    def pooling(self) -> PoolingSpec:
        """The model's pooling."""
        return self.model.session.opened.pooling

    async def embed(
        self, texts: str | Sequence[Any], param: str, prompt_name: str | None, **options: Any
    ) -> tuple[Vectors, int]:
        """Embed texts in batches. Returns the vectors and the number of tokens."""
        tokens_of_texts = await self.service.in_thread(self.tokens, texts, param, prompt_name)
        rows = await self.batched(text_embeddings.embed_texts, tokens_of_texts, **options)
        return np.stack(rows), sum(len(item.ids) for item in tokens_of_texts)

    def skipped_ids(self) -> frozenset[int]:
        """Return the document tokens that late interaction skips."""
        found = map(self.model.session.tokenizer.id, self.pooling.skipped)
        return frozenset(id for id in found if id is not None)

    async def batched(
        self, compute: Callable[..., Iterable[Any]], texts: Sequence[Any], **options: Any
    ) -> list[Any]:
        """Call `compute(session, group, ...)` for groups of similar length; return a result per
        text.

        Args:
            texts: tokenized texts, with `ids`.
        """
        # Texts of similar length are batched together, so that little padding is computed.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i].ids))
        session = self.model.session
        size = session.engine.scheduler.slots
        rows: dict[int, Any] = {}
        for begin in range(0, len(order), size):
            group = [texts[i] for i in order[begin : begin + size]]
            found = await self.service.in_engine_thread(compute, session, group, **options)
            rows.update(zip(order[begin : begin + size], found, strict=True))
        return [rows[i] for i in range(len(texts))]

    def tokens(
        self, texts: str | Sequence[Any], param: str, prompt_name: str | None
    ) -> list[text_embeddings.EmbeddingTokens]:
        """Tokenize texts, each after the named prompt of the model. Slow: use a worker thread."""
        try:
            prompt, skipped = text_embeddings.embedding_prompt(self.model.session, prompt_name)
        except RequestError as error:
            raise as_api_error(error, param="prompt_name") from error
        listed = [texts] if is_single_prompt(texts) else [*texts]
        are_texts = [isinstance(item, str) for item in listed]
        if prompt_name is not None and not all(are_texts):
            raise invalid_request("a prompt cannot precede token ids", "prompt_name")
        worded = [
            self.pooling.text(item, prompt) if isinstance(item, str) else item for item in listed
        ]
        found = self.ids(worded, param)
        counts = [skipped if item else 0 for item in are_texts]
        return [
            text_embeddings.EmbeddingTokens(ids, min(count, len(ids) - 1))
            for ids, count in zip(found, counts, strict=True)
        ]

    def ids(
        self, texts: str | Sequence[Any], param: str, *, special: bool | None = None
    ) -> list[list[int]]:
        """Tokenize texts and check their lengths. Slow: use a worker thread."""
        session = self.model.session
        if session.engine.runner.model.has_cross_attention:
            raise unsupported_field("an encoder-decoder does not compute vectors of texts", "model")
        limit = self.service.settings.max_prompts
        listed = prompt_ids(texts, session, limit, special=special, param=param)
        return [self.fitting(number, ids, param) for number, ids in enumerate(listed)]

    def fitting(self, number: int, ids: list[int], param: str) -> list[int]:
        """Truncate the tokens of a text, if requested. Raises `ApiError` if they do not fit."""
        longest = text_embeddings.max_text_tokens(self.model.session)
        if self.truncate is not None:
            if not (self.truncate == -1 or 1 <= self.truncate <= longest):
                raise invalid_request(
                    f"it must be -1, or from 1 to {int(longest)}",
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
async def embedder_of(
    request: RequestContext[Any], truncate: int | None
) -> AsyncIterator[Embedder]:
    """Provide the embedder of a request. Raises `ApiError` for an unknown model."""
    request.note(user=request.body.user)
    async with request.service.models.use(request.body.model) as model:
        request.note(model=model.name)
        yield Embedder(request.service, model, truncate)

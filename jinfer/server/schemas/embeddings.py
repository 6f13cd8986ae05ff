"""Schemas of embeddings and masked language modelling."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from jinfer.opening.pooling_config import Pooling
from jinfer.server.schemas.schema_base import MixedPrompts, RequestModel, ResponseModel


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

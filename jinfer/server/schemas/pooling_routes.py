"""Schemas of /classify and /pooling."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from jinfer.server.schemas.embeddings import EmbeddingUsage
from jinfer.server.schemas.schema_base import MixedPrompts, RequestModel, ResponseModel

PoolingTask = Literal["embed", "classify", "token_embed"]


class ClassifyRequest(RequestModel):
    """A request to /classify."""

    input: MixedPrompts
    use_activation: bool | None = Field(None, description="false: scores as the head gives them")
    add_special_tokens: bool | None = Field(None, description="false: nothing around a text")
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = Field(None, description="is logged")


class TextClass(ResponseModel):
    """The classes of a text."""

    index: int
    label: str = Field(description="of the highest score")
    probs: list[float] = Field(description="of each class")
    num_classes: int


class ClassifyResponse(ResponseModel):
    """The response of /classify, in the order of the texts."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    labels: list[str] = Field(description="names of the classes, in the order of `probs`")
    data: list[TextClass]
    usage: EmbeddingUsage


class PoolingRequest(RequestModel):
    """A request to /pooling."""

    input: MixedPrompts
    task: PoolingTask | None = Field(
        None,
        description="without it: classes of a model with a head for them, token vectors of one "
        "that compares them (ColBERT), else one vector a text",
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, description="only the first so many numbers")
    normalize: bool | None = None
    use_activation: bool | None = Field(None, description="false: scores as the head gives them")
    prompt_name: str | None = Field(None, description="of the model's prompts, before each text")
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = Field(None, description="is logged")


class PooledText(ResponseModel):
    """What a text becomes; as base64, little-endian float32, row by row."""

    index: int
    object: Literal["pooling"]
    data: list[Any] | str


class PoolingResponse(ResponseModel):
    """The response of /pooling, in the order of the texts."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledText]
    usage: EmbeddingUsage

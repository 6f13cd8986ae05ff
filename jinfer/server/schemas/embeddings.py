"""Schemas of embeddings and masked language modelling."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from jinfer.loader.config.pooling_config import Pooling
from jinfer.server.schemas.schema_base import MixedPrompts, RequestModel, ResponseModel


class TextPart(RequestModel):
    """A part of a text."""

    type: Literal["text", "input_text"]
    text: str


class TextObject(RequestModel):
    """A text as llama.cpp also has it."""

    prompt_string: str | None = None
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
    embed_dtype: NumberType | None = Field(None, description="of numbers in base64 (vLLM)")
    endianness: Literal["native", "little", "big"] | None = Field(
        None, description="of numbers in base64 (vLLM)"
    )
    dimensions: int | None = Field(None, ge=1, description="only the first so many numbers")
    user: str | None = Field(None, description="is logged")
    truncate_prompt_tokens: int | None = Field(None, description="keeps the first ones")
    pooling: Pooling | None = None
    normalize: bool | None = None
    use_activation: bool | None = Field(None, description="vLLM's name of normalize")
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

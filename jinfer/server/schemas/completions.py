"""Schemas of text completions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from jinfer.server.schemas.sampling_fields import SamplingFields
from jinfer.server.schemas.schema_base import (
    Prompts,
    ResponseModel,
    StreamOptions,
    Timings,
    TokenUsage,
)


class CompletionRequest(SamplingFields):
    """A request to /v1/completions."""

    prompt: Prompts
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: str | None = Field(None, description="refused: models are not asked to fill in")
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description="in logprobs (vLLM)")
    user: str | None = Field(None, description="is logged")


class TextLogprobs(ResponseModel):
    """Log-probabilities of an answer's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int]


class TextChoice(ResponseModel):
    """One answer."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class CompletionResponse(ResponseModel):
    """The response of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: TokenUsage
    timings: Timings | None = None

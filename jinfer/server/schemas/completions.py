"""Schemas of text completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jinfer.server.schemas import schema_base as base
from jinfer.server.schemas.sampling_fields import SamplingFields


class CompletionRequest(SamplingFields):
    """A request to /v1/completions."""

    prompt: base.Prompts
    model: str | None = None
    stream: bool | None = None
    stream_options: base.StreamOptions | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: str | None = Field(None, description="what follows the gap that is filled in (FIM)")
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description="in logprobs (vLLM)")
    user: str | None = Field(None, description="is logged")
    prompt_embeds: Annotated[None, base.rejected_field("prompts are texts or token ids")] = None


class TextLogprobs(base.ResponseModel):
    """Log-probabilities of an answer's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int]


class TextChoice(base.ResponseModel):
    """One answer."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class CompletionResponse(base.ResponseModel):
    """The response of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    system_fingerprint: str
    model: str
    choices: list[TextChoice]
    usage: base.TokenUsage
    timings: base.Timings | None = None

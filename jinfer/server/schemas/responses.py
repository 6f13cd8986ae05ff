"""OpenAI's responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jinfer.server.schemas.base import MOST_PARTS, Answer, No, StreamOptions, Strict
from jinfer.server.schemas.chat import FunctionName


class InputPart(Strict):
    """A part of a message; only texts are read."""

    type: Literal[
        "input_text", "output_text", "text", "refusal", "input_image", "input_file", "input_audio"
    ]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None
    input_audio: dict[str, Any] | None = None


class InputItem(Strict):
    """A message, a call of a function, what it gave, or what the model thought."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | list[dict[str, Any]] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[dict[str, Any]] | None = None
    encrypted_content: None = None


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunctionTool(Strict):
    """The one function that the model has to call."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(Strict):
    """What an answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """How an answer is to look."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Strict):
    """How the model is to think."""

    effort: str | None = None
    summary: None = None


class ResponseRequest(Strict):
    """What is asked of /v1/responses."""

    input: str | Annotated[list[InputItem], Field(max_length=MOST_PARTS)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[Literal["message.output_text.logprobs"]] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=MOST_PARTS)
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: the oldest messages are left out until the rest fits"
    )
    metadata: dict[str, str] | None = None
    user: str | None = Field(None, description="is logged")
    safety_identifier: str | None = None
    prompt_cache_key: str | None = Field(None, description="beginnings are found without one")
    service_tier: Literal["auto", "default"] | None = None
    store: bool | None = Field(None, description="nothing is stored: only false")
    background: No | None = None
    previous_response_id: None = Field(None, description="nothing is stored")
    conversation: None = Field(None, description="nothing is stored")
    prompt: None = Field(None, description="nothing is stored")


class ResponseUsage(Answer):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(Answer):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    usage: ResponseUsage

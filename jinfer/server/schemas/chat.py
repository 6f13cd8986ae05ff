"""Chat completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jinfer.server.schemas.base import MOST_PARTS, Answer, StreamOptions, Strict, Timings, Usage
from jinfer.server.schemas.sampling import Sampling

FunctionName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]


class Part(Strict):
    """A part of a message; only texts are read."""

    type: Literal["text", "refusal", "image_url", "input_audio", "file"]
    text: str | None = None
    refusal: str | None = None
    image_url: dict[str, Any] | None = None
    input_audio: dict[str, Any] | None = None
    file: dict[str, Any] | None = None


class FunctionCall(Strict):
    """A function that the model called, and its arguments as a JSON text."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call in a message of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # OpenAI's answers have them, mostly none.
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class Function(Strict):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema")
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The name of a function."""

    name: FunctionName


class NamedTool(Strict):
    """The one tool that the model has to use."""

    type: Literal["function"]
    function: NamedFunction


class Rendering(Strict):
    """How a conversation becomes a prompt."""

    messages: list[Message] = Field(min_length=1, max_length=MOST_PARTS)
    tools: list[Tool] | None = Field(None, max_length=MOST_PARTS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(None, description="only where the operator allows it")
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = Field(None, description="where the model's template reads it")


class ChatRequest(Sampling, Rendering):
    """What is asked of /v1/chat/completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    parallel_tool_calls: bool | None = None
    user: str | None = Field(None, description="is logged")
    metadata: dict[str, str] | None = Field(None, description="is logged")
    safety_identifier: str | None = None
    prompt_cache_key: str | None = Field(None, description="beginnings are found without one")
    store: bool | None = Field(None, description="only false: nothing is stored")
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    prediction: None = None
    audio: None = None
    web_search_options: None = None


class TopLogprob(Answer):
    """A token that was likely too."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    """A token, and others at its place."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Answer):
    """How likely the tokens were."""

    content: list[TokenLogprob] | None = None
    refusal: None = None


class AnswerMessage(Answer):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(Answer):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter"]


class ChatAnswer(Answer):
    """Whole answers."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    timings: Timings | None = None

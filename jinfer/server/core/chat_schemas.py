"""Schemas of chat completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from jinfer.server.core.sampling_fields import SamplingFields
from jinfer.server.http import schema_base as base

FunctionName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$")]
CacheControl = Annotated[
    dict[str, Any] | None, Field(description="Anthropic's: beginnings are found without it")
]


class ContentPart(base.RequestModel):
    """A content part of a message; only text is supported."""

    type: Literal["text", "refusal", "image_url", "input_audio", "file"]
    text: str | None = None
    refusal: str | None = None
    image_url: dict[str, Any] | None = None
    input_audio: dict[str, Any] | None = None
    file: dict[str, Any] | None = None
    cache_control: CacheControl = None


class FunctionCall(base.ReplayedModel):
    """A function call by the model, with its arguments as JSON text."""

    name: str
    arguments: base.JsonText = Field("", description="none: {}; an object counts as its text")


class ToolCall(base.ReplayedModel):
    """A tool call in an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(base.ReplayedModel):
    """A message of a conversation."""

    role: str = Field(description="system, developer, user, assistant, tool, or a template's own")
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="another name of reasoning_content")
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = Field(None, description="an older form of one call")
    cache_control: CacheControl = None

    @property
    def was_answer(self) -> bool:
        """Assistant messages were answers once."""
        return self.role == "assistant"


class Function(base.RequestModel):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema")
    strict: bool | None = None
    cache_control: CacheControl = None


class Tool(base.RequestModel):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function
    cache_control: CacheControl = None


class NamedFunction(base.RequestModel):
    """The name of a function."""

    name: FunctionName


class NamedTool(base.RequestModel):
    """A tool choice that names the tool to call."""

    type: Literal["function"]
    function: NamedFunction


AnyTool = Annotated[
    Annotated[Tool, Tag("function")] | Annotated[base.OtherTool, Tag("other")],
    Discriminator(base.tool_kind),
]


class ThinkingOptions(base.RequestModel):
    """Whether the model thinks before it answers, and how long (Anthropic)."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools", "auto"]
    budget_tokens: int | None = Field(None, ge=-1, description="then the thought is ended")
    display: Annotated[
        Literal["summarized", "omitted"] | None, base.Ignored("thoughts are given as they are")
    ] = None


class ReasoningFields(base.RequestModel):
    """The same in OpenRouter's words."""

    effort: str | None = Field(None, description="as reasoning_effort")
    max_tokens: int | None = Field(None, ge=-1, description="then the thought is ended")
    enabled: bool | None = None
    exclude: bool | None = Field(None, description="true: thoughts are left out of the answer")


class ChatTemplateFields(base.RequestModel):
    """The fields that a chat template renders into a prompt."""

    messages: list[Message] = Field(min_length=1, max_length=base.MAX_ITEMS)
    tools: list[AnyTool] | None = Field(None, max_length=base.MAX_ITEMS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(None, description="only where the operator allows it")
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = Field(
        None, description="where the model's template reads it; none: the model does not think"
    )
    reasoning: ReasoningFields | None = None
    thinking: ThinkingOptions | None = None
    enable_thinking: bool | None = Field(None, description="as in chat_template_kwargs")


Store = Annotated[bool | None, base.Ignored("nothing is stored here", (False,))]
ServiceTier = Annotated[
    str | None, base.Ignored("all requests are served alike", ("auto", "default"))
]
Verbosity = Annotated[
    Literal["low", "medium", "high"] | None,
    base.Ignored("how much the model says is its own matter", ("medium",)),
]


class ChatRequest(SamplingFields, ChatTemplateFields):
    """A request to /v1/chat/completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: base.StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    parallel_tool_calls: bool | None = None
    user: str | None = Field(None, description="is logged")
    metadata: dict[str, str] | None = Field(None, description="is logged")
    safety_identifier: str | None = None
    prompt_cache_key: str | None = Field(None, description="beginnings are found without one")
    prompt_cache_retention: str | None = None
    store: Store = None
    service_tier: ServiceTier = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Verbosity = None
    prediction: Annotated[dict[str, Any] | None, base.Ignored("the model guesses by itself")] = None
    return_tokens_as_token_ids: bool | None = Field(None, description="in logprobs (vLLM)")
    audio: Annotated[None, base.rejected_field("answers are texts only")] = None
    include_reasoning: bool | None = Field(None, description="false: thoughts are left out (vLLM)")
    return_prompt_text: bool | None = Field(None, description="prompt_text in the answer (vLLM)")
    echo: Annotated[
        None, base.rejected_field("continue_final_message goes on with a message", False)
    ] = None
    add_special_tokens: Annotated[
        None, base.rejected_field("the chat template adds the special tokens", False)
    ] = None
    reasoning_format: Annotated[
        None, base.rejected_field("thoughts are in reasoning_content", "auto", "deepseek")
    ] = None
    parse_tool_calls: Literal[True] | None = Field(
        None, description="calls are always told from the answer"
    )
    functions: Annotated[None, base.rejected_field("tools says it", [])] = None
    function_call: Annotated[None, base.rejected_field("tool_choice says it", "none", "auto")] = (
        None
    )
    moderation: Annotated[dict[str, Any] | None, base.Ignored("nothing here moderates")] = None
    prompt_cache_options: Annotated[
        dict[str, Any] | None, base.Ignored("equal beginnings are found without them")
    ] = None
    web_search_options: Annotated[
        dict[str, Any] | None, base.Ignored("nothing here searches the web")
    ] = None


class TopLogprob(base.ResponseModel):
    """An alternative token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatTokenLogprob(TopLogprob):
    """A token with its log-probability and alternatives."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(base.ResponseModel):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatTokenLogprob] | None = None
    refusal: None = None


class AnswerMessage(base.ResponseModel):
    """A message generated by the model."""

    role: Literal["assistant"]
    content: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(base.ResponseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter"]


Conversation = Annotated[list[Message], Field(min_length=1, max_length=1024)]


class ChatBatchRequest(ChatRequest):
    """A request to /v1/chat/completions/batch: the messages of several conversations."""

    messages: list[Conversation] = Field(  # type: ignore[assignment]
        min_length=1, max_length=256
    )


class ChatResponse(base.ResponseModel):
    """The response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    system_fingerprint: str
    model: str
    choices: list[ChatChoice]
    usage: base.TokenUsage
    timings: base.Timings | None = None


class TokenCount(base.ResponseModel):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int

"""Schemas of chat completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from jinfer.server.core.sampling_fields import SamplingFields
from jinfer.server.http import schema_base as base

FunctionName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$")]
CacheControl = Annotated[
    dict[str, Any] | None, Field(description="Anthropic's; the prefix cache works without it")
]


ImageDetail = Annotated[
    Literal["auto", "low", "high", "original"] | None,
    base.Ignored("images have the model's own resolution", ("auto",)),
]


class ImageUrl(base.RequestModel):
    """An image: a data URL, or the URL of an allowed host or folder."""

    url: str
    detail: ImageDetail = None


def _image_object(value: Any) -> Any:
    if isinstance(value, str):
        raise PydanticCustomError("type", 'write an object: {"url": "data:image/png;base64,..."}')
    return value


class ContentPart(base.RequestModel):
    """A content part of a message; text and images are supported."""

    type: Literal["text", "refusal", "image_url", "input_audio", "file"]
    text: str | None = None
    refusal: str | None = None
    image_url: Annotated[ImageUrl | None, BeforeValidator(_image_object)] = None
    uuid: str | None = Field(None, description="not needed: equal images are found by content")
    input_audio: dict[str, Any] | None = None
    file: dict[str, Any] | None = None
    cache_control: CacheControl = None


class FunctionCall(base.ReplayedModel):
    """A function call by the model, with its arguments as JSON text."""

    name: str
    arguments: base.JsonText = Field(
        "", description="empty: {}; an object is read as its JSON text"
    )


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
    function_call: FunctionCall | None = Field(None, description="the older form of a single call")
    cache_control: CacheControl = None

    @property
    def was_answer(self) -> bool:
        """Return whether the message is an earlier answer."""
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
    budget_tokens: int | None = Field(None, ge=-1, description="the thought ends at this budget")
    display: Annotated[
        Literal["summarized", "omitted"] | None, base.Ignored("thoughts are not summarized")
    ] = None


class ReasoningFields(base.RequestModel):
    """OpenRouter's fields for the same."""

    effort: str | None = Field(None, description="as reasoning_effort")
    max_tokens: int | None = Field(None, ge=-1, description="the thought ends at this budget")
    enabled: bool | None = None
    exclude: bool | None = Field(None, description="true: the answer has no thoughts")


class ChatTemplateFields(base.RequestModel):
    """The fields that a chat template renders into a prompt."""

    messages: list[Message] = Field(min_length=1, max_length=base.MAX_ITEMS)
    tools: list[AnyTool] | None = Field(None, max_length=base.MAX_ITEMS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(None, description="only with --request-chat-templates")
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = Field(
        None, description="needs a template that reads it; none: the model does not think"
    )
    reasoning: ReasoningFields | None = None
    thinking: ThinkingOptions | None = None
    enable_thinking: bool | None = Field(None, description="as in chat_template_kwargs")


Store = Annotated[bool | None, base.Ignored("chat completions are not stored", (False,))]
ServiceTier = Annotated[
    str | None, base.Ignored("all requests have the same service tier", ("auto", "default"))
]
Verbosity = Annotated[
    Literal["low", "medium", "high"] | None,
    base.Ignored("the length of an answer cannot be set", ("medium",)),
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
    prompt_cache_key: str | None = Field(None, description="the prefix cache works without it")
    prompt_cache_retention: str | None = None
    store: Store = None
    service_tier: ServiceTier = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Verbosity = None
    prediction: Annotated[dict[str, Any] | None, base.Ignored("drafts come from the engine")] = None
    return_tokens_as_token_ids: bool | None = Field(None, description="in logprobs (vLLM)")
    audio: Annotated[None, base.rejected_field("answers have text only")] = None
    include_reasoning: bool | None = Field(
        None, description="false: the answer has no thoughts (vLLM)"
    )
    return_prompt_text: bool | None = Field(
        None, description="adds prompt_text to the answer (vLLM)"
    )
    echo: Annotated[None, base.rejected_field("use continue_final_message", False)] = None
    add_special_tokens: Annotated[
        None, base.rejected_field("the chat template adds the special tokens", False)
    ] = None
    reasoning_format: Annotated[
        None, base.rejected_field("reasoning_content has the thoughts", "auto", "deepseek")
    ] = None
    parse_tool_calls: Literal[True] | None = Field(None, description="tool calls are always parsed")
    functions: Annotated[None, base.rejected_field("use tools", [])] = None
    function_call: Annotated[None, base.rejected_field("use tool_choice", "none", "auto")] = None
    moderation: Annotated[dict[str, Any] | None, base.Ignored("answers are not moderated")] = None
    prompt_cache_options: Annotated[
        dict[str, Any] | None, base.Ignored("the prefix cache works without it")
    ] = None
    web_search_options: Annotated[
        dict[str, Any] | None, base.Ignored("the server does not search the web")
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

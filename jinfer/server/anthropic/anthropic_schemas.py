"""Schemas of the Messages API (Anthropic)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from jinfer.server.core import chat_schemas as chat
from jinfer.server.core.sampling_fields import SamplingFields
from jinfer.server.http import schema_base as base

_Citations = Annotated[
    dict[str, Any] | list[dict[str, Any]] | None,
    base.Ignored("answers have no citations", ({"enabled": False}, [])),
]


class TextBlock(base.RequestModel):
    """A text."""

    type: Literal["text"]
    text: str
    citations: list[dict[str, Any]] | None = None
    cache_control: chat.CacheControl = None


class _SourceFields(base.RequestModel):
    """The fields of a text, a document, a search result or an image."""

    text: str | None = None
    source: str | dict[str, Any] | None = Field(
        None,
        description="for documents: an object of type text or content; for images: of type base64 "
        "or url; for search results: a URL",
    )
    title: str | None = None
    context: str | None = None
    citations: _Citations = None
    cache_control: chat.CacheControl = None


class ResultBlock(_SourceFields):
    """A part of a tool result: text or an image."""

    type: Literal["text", "image", "document", "search_result", "tool_reference"]
    content: list[TextBlock] | None = Field(None, description="for search results")
    tool_name: str | None = None


class UserBlock(_SourceFields):
    """A content block of a user's message: text, an image, or the result of a tool."""

    type: Literal["text", "image", "document", "search_result", "tool_result", "container_upload"]
    content: str | list[ResultBlock] | None = Field(
        None, description="for tool results and search results"
    )
    tool_use_id: str | None = None
    is_error: bool | None = Field(None, description='true: the result begins with "Error: "')
    toolset_name: str | None = None
    file_id: str | None = None


class AnswerBlock(base.ReplayedModel):
    """A content block of an answer; results of other services' tools are ignored."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = Field(None, description="not checked")
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    caller: dict[str, Any] | None = None
    citations: list[dict[str, Any]] | None = None
    cache_control: chat.CacheControl = None


class UserMessage(base.RequestModel):
    """A message of the user, or a system message within the conversation."""

    role: Literal["user", "system"]
    content: str | list[UserBlock]
    cache_control: chat.CacheControl = None


class AssistantMessage(base.ReplayedModel):
    """An answer; as the last message, the beginning of the next answer."""

    role: Literal["assistant"]
    content: str | list[AnswerBlock]
    cache_control: chat.CacheControl = None


def _sender(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return "assistant" if role == "assistant" else "user"


AnyMessage = Annotated[
    Annotated[UserMessage, Tag("user")] | Annotated[AssistantMessage, Tag("assistant")],
    Discriminator(_sender),
]


class ClientTool(base.RequestModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: chat.FunctionName
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="a JSON schema")
    strict: bool | None = None
    eager_input_streaming: bool | None = Field(
        None, description="true: stream tool calls before they are complete"
    )
    defer_loading: Annotated[bool | None, base.Ignored("the prompt has all tools", (False,))] = None
    allowed_callers: Annotated[
        list[str] | None, base.Ignored("only the model may call tools", (["direct"],))
    ] = None
    input_examples: Annotated[
        list[dict[str, Any]] | None, base.Ignored("chat templates do not read examples")
    ] = None
    cache_control: chat.CacheControl = None


def _tool_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "other" if isinstance(kind, str) and kind != "custom" else "custom"


AnyClientTool = Annotated[
    Annotated[ClientTool, Tag("custom")] | Annotated[base.OtherTool, Tag("other")],
    Discriminator(_tool_kind),
]


class ToolChoice(base.RequestModel):
    """Which tools the answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: chat.FunctionName | None = Field(None, description="for the type tool")
    disable_parallel_tool_use: bool | None = None


class OutputFormat(base.RequestModel):
    """The JSON schema of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(base.RequestModel):
    """Options of the answer."""

    effort: str | None = Field(None, description="needs a template that reads it")
    format: OutputFormat | None = None


class MessageMetadata(base.RequestModel):
    """Metadata of the request."""

    user_id: str | None = None


_Elsewhere = base.Ignored("it is for another service")


class ConversationFields(base.RequestModel):
    """Fields of a conversation, for answers and token counts."""

    messages: list[AnyMessage] = Field(min_length=1, max_length=base.MAX_ITEMS)
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[AnyClientTool] | None = Field(None, max_length=base.MAX_ITEMS)
    tool_choice: ToolChoice | None = None
    thinking: chat.ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        None, description="older name of output_config.format"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: chat.CacheControl = None
    context_management: Annotated[
        dict[str, Any] | None, base.Ignored("the conversation is not edited")
    ] = None
    mcp_servers: Annotated[
        list[dict[str, Any]] | None, base.Ignored("the server does not call tools")
    ] = None
    speed: Annotated[
        str | None, base.Ignored("all requests have the same service tier", ("standard",))
    ] = None
    betas: Annotated[list[str] | None, _Elsewhere] = None
    anthropic_beta: Annotated[list[str] | None, _Elsewhere] = None
    anthropic_version: Annotated[str | None, _Elsewhere] = None


class CountTokensRequest(ConversationFields):
    """A request to /v1/messages/count_tokens."""


class MessagesRequest(ConversationFields, SamplingFields):
    """A request to /v1/messages."""

    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: MessageMetadata | None = Field(None, description="is logged")
    service_tier: Annotated[
        str | None,
        base.Ignored("all requests have the same service tier", ("auto", "standard_only")),
    ] = None
    container: Annotated[
        str | dict[str, Any] | None, base.Ignored("the server does not execute code")
    ] = None
    inference_geo: Annotated[str | None, _Elsewhere] = None
    diagnostics: Annotated[dict[str, Any] | None, _Elsewhere] = None
    compaction: Annotated[dict[str, Any] | None, _Elsewhere] = None
    fallbacks: Annotated[str | list[Any] | dict[str, Any] | None, _Elsewhere] = None


class MessageUsage(base.ResponseModel):
    """Token counts; input tokens exclude tokens found in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(base.ResponseModel):
    """The response of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage


class MessageErrorDetail(BaseModel):
    """The error object."""

    type: str
    message: str


class MessageErrorResponse(BaseModel):
    """The response of a failed request."""

    type: Literal["error"]
    error: MessageErrorDetail

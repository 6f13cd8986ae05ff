"""Schemas of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Discriminator, Field, Tag

from jinfer.server.core import chat_schemas as chat
from jinfer.server.core.sampling_fields import SamplingFields
from jinfer.server.http import schema_base as base


class InputPart(base.ReplayedModel):
    """A content part of a message: text or an image."""

    type: Literal[
        "input_text", "output_text", "text", "refusal", "input_image", "input_file", "input_audio"
    ]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    image_url: str | None = Field(None, description="a data URL, or that of an allowed host")
    detail: chat.ImageDetail = None
    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None
    input_audio: dict[str, Any] | None = None
    cache_control: chat.CacheControl = None

    @property
    def was_answer(self) -> bool:
        """Return whether the content type is of an earlier answer."""
        return self.type in ("output_text", "refusal")


# Calls of tools that another service runs, which the model does not read.
HostedCall = Literal[
    "web_search_call",
    "file_search_call",
    "computer_call",
    "computer_call_output",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_list_tools",
    "mcp_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "compaction",
]
HOSTED_CALLS: tuple[str, ...] = get_args(HostedCall)
ItemType = Literal[
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "local_shell_call",
    "local_shell_call_output",
    "reasoning",
    "item_reference",
]


class InputItem(base.ReplayedModel):
    """An input item: a message, a call of a tool, its output, or reasoning."""

    type: ItemType | HostedCall = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | list[dict[str, Any]] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: base.JsonText | None = None
    input: str | None = Field(None, description="for custom tool calls")
    action: dict[str, Any] | None = Field(None, description="for shell calls")
    output: str | list[InputPart] | None = None
    summary: list[dict[str, Any]] | None = None
    encrypted_content: Annotated[str | None, base.Ignored("thoughts are not summarized")] = None
    cache_control: chat.CacheControl = None

    @property
    def was_answer(self) -> bool:
        """Return whether the role or type is of an earlier answer."""
        inputs = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
        return self.role == "assistant" or self.type not in ("message", *inputs)


class FunctionTool(base.RequestModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: chat.FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Annotated[bool | None, base.Ignored("the prompt has all tools", (False,))] = None
    cache_control: chat.CacheControl = None


class CustomToolFormat(base.RequestModel):
    """The format of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(base.RequestModel):
    """A custom (freeform) tool, whose input is a text."""

    type: Literal["custom"]
    name: chat.FunctionName
    description: str | None = None
    format: CustomToolFormat | None = Field(
        None, description="a grammar becomes part of the prompt, but is not enforced"
    )
    defer_loading: Annotated[bool | None, base.Ignored("the prompt has all tools", (False,))] = None


class NamedResponseTool(base.RequestModel):
    """A tool choice that names the tool to call."""

    type: Literal["function", "custom"]
    name: chat.FunctionName


class AllowedTools(base.RequestModel):
    """A tool choice that restricts the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]] = Field(min_length=1, max_length=base.MAX_ITEMS)


class TextFormat(base.RequestModel):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(base.RequestModel):
    """Text options of the answer."""

    format: TextFormat | None = None
    verbosity: chat.Verbosity = None


_Summary = Annotated[
    Literal["auto", "concise", "detailed"] | None, base.Ignored("thoughts are not summarized")
]
LOGPROBS: Final = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ReasoningOptions(chat.ReasoningFields):
    """Reasoning options of OpenAI and OpenRouter."""

    summary: _Summary = None
    generate_summary: _Summary = None


def _tool_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "custom" if kind == "custom" else base.tool_kind(value)


AnyResponseTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[base.OtherTool, Tag("other")],
    Discriminator(_tool_kind),
]


_NOT_HERE = base.rejected_field("the server does not store them; use previous_response_id")


class ResponseRequest(SamplingFields):
    """A request to /v1/responses."""

    input: str | Annotated[list[InputItem], Field(max_length=base.MAX_ITEMS)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[Include] | None = Field(
        None, description=f"{LOGPROBS}; values for other services' tools have no effect"
    )
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[AnyResponseTool] | None = Field(None, max_length=base.MAX_ITEMS)
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | AllowedTools | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: base.StreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: drop the oldest messages until the rest fits"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    client_metadata: Annotated[dict[str, Any] | None, base.Ignored("it has no effect here")] = None
    max_tool_calls: Annotated[int | None, base.Ignored("the server does not call tools")] = None
    user: str | None = Field(None, description="is logged")
    safety_identifier: str | None = None
    prompt_cache_key: str | None = Field(None, description="the prefix cache works without it")
    prompt_cache_retention: str | None = None
    service_tier: chat.ServiceTier = None
    store: bool | None = Field(None, description="false: do not store the answer")
    background: bool | None = Field(
        None, description="true: return immediately; retrieve the answer later"
    )
    previous_response_id: str | None = Field(
        None, description="continues the conversation of a stored response"
    )
    conversation: Annotated[None, _NOT_HERE] = None
    prompt: Annotated[None, _NOT_HERE] = None


class InputTokensRequest(ResponseRequest):
    """A request to /v1/responses/input_tokens."""

    input: str | Annotated[list[InputItem], Field(max_length=base.MAX_ITEMS)] = ""


class InputTokens(base.ResponseModel):
    """The response of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(base.ResponseModel):
    """The response of DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(base.ListPage):
    """The response of /v1/responses/{response_id}/input_items."""

    data: list[dict[str, Any]]


class ResponseUsage(base.ResponseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(base.ResponseModel):
    """The response of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: dict[str, Any] | None = None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    usage: ResponseUsage | None = None

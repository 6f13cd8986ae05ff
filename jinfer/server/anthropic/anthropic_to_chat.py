"""Anthropic to chat: translates conversations of the Messages API to chat requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from jinfer.server.anthropic.anthropic_schemas import (
    AnswerBlock,
    AssistantMessage,
    ClientTool,
    ConversationFields,
    MessagesRequest,
    OutputFormat,
    ResultBlock,
    TextBlock,
    UserBlock,
    UserMessage,
)
from jinfer.server.core.chat_schemas import ChatRequest
from jinfer.server.core.sampling_fields import SamplingFields
from jinfer.server.http.http_errors import invalid_request, unsupported_field
from jinfer.server.http.request_body import Ignore, validated

type Content = str | dict[str, Any]  # a text, or an image as a part of a chat message

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(body: ConversationFields, ignore: Ignore) -> ChatRequest:
    """Translate a conversation to a chat request.

    Args:
        ignore: records fields that have no effect.

    Raises:
        ApiError: the conversation has unsupported content.
    """
    messages = _Messages(ignore)
    if body.system:
        messages.add("system", _parts(body.system, "system"))
    for number, message in enumerate(body.messages):
        messages.take(message, f"messages.{number}")
    chat: dict[str, Any] = {
        name: value
        for name, value in body.given_fields().items()
        if name in SamplingFields.model_fields
    }
    chat |= {"model": body.model, "messages": messages.done}  # may be the name of an adapter
    if isinstance(body.messages[-1], AssistantMessage):
        if messages.done[-1].get("tool_calls"):
            raise invalid_request(
                "the last message has tool_use blocks; add their tool_result blocks",
                f"messages.{len(body.messages) - 1}.content",
            )
        chat["continue_final_message"] = True
    if isinstance(body, MessagesRequest) and body.stop_sequences is not None:
        if chat.get("stop") is not None:
            raise invalid_request("it cannot be used together with stop", "stop_sequences")
        chat["stop"] = body.stop_sequences
    if body.chat_template_kwargs:
        chat["chat_template_kwargs"] = body.chat_template_kwargs
    if body.thinking is not None:
        chat["thinking"] = body.thinking.given_fields()
    if body.output_config is not None and body.output_config.effort is not None:
        chat["reasoning_effort"] = body.output_config.effort
    if (format := _format(body)) is not None:
        if chat.get("response_format") is not None:
            raise invalid_request(
                "it cannot be used together with response_format", "output_config.format"
            )
        schema = {"name": "answer", "schema": format.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return validated({**chat, **_tools(body)}, ChatRequest)


def _format(body: ConversationFields) -> OutputFormat | None:
    new = body.output_config and body.output_config.format
    if new and body.output_format:
        raise invalid_request(
            "it cannot be used together with output_config.format", "output_format"
        )
    return new or body.output_format


def _tools(body: ConversationFields) -> dict[str, Any]:
    """Translate the tools and the tool choice; tools of other services keep their positions."""
    result: dict[str, Any] = {}
    if body.tools:
        result["tools"] = [
            _function(tool) if isinstance(tool, ClientTool) else tool.model_dump()
            for tool in body.tools
        ]
    choice = body.tool_choice
    if choice is None:
        return result
    if choice.disable_parallel_tool_use is not None:
        result["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if choice.type != "tool":
        return {**result, "tool_choice": _CHOICES[choice.type]}
    if choice.name is None:
        raise invalid_request("the type tool needs the tool's name", "tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    return {**result, "tool_choice": named}


def _function(tool: ClientTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


class _Messages:
    """Collects chat messages; consecutive messages of a role become a single message.

    The content of `done` is a text, or a list of parts if there are images.
    """

    def __init__(self, ignore: Ignore) -> None:
        self.done: list[dict[str, Any]] = []
        self._ignore = ignore

    def take(self, message: UserMessage | AssistantMessage, path: str) -> None:
        """Add a message."""
        if isinstance(message.content, str):
            self.add(message.role, [message.content])
        elif isinstance(message, AssistantMessage):
            self._answer(message.content, f"{path}.content")
        else:
            self._user(message, message.content, f"{path}.content")

    def add(self, role: str, content: Sequence[Content], **more: Any) -> None:
        """Add texts and images of a role."""
        last = self.done[-1] if self.done else {}
        if role == "tool" or last.get("role") != role:
            self.done.append({"role": role, "content": _joined(content), **more})
            return
        if content:
            before = last["content"] or []
            parts = [before] if isinstance(before, str) else before
            last["content"] = _joined([*parts, *content])
        if thought := more.get("reasoning_content"):
            last["reasoning_content"] = last.get("reasoning_content", "") + thought
        if calls := more.get("tool_calls"):
            last["tool_calls"] = [*last.get("tool_calls", []), *calls]

    def _user(self, message: UserMessage, blocks: Iterable[UserBlock], path: str) -> None:
        content: list[Content] = []
        for number, block in enumerate(blocks):
            place = f"{path}.{number}"
            if block.type != "tool_result":
                content.append(_part(block, place))
                continue
            if block.tool_use_id is None or message.role != "user":
                raise invalid_request("a tool_result needs a tool_use_id, from a user", place)
            if content:
                self.add(message.role, content)
                content = []
            found = _parts(block.content or "", f"{place}.content")
            if block.is_error:
                found = _as_error(found)
            self.add("tool", found, tool_call_id=block.tool_use_id)
        if content:
            self.add(message.role, content)

    def _answer(self, blocks: Iterable[AnswerBlock], path: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for number, block in enumerate(blocks):
            place = f"{path}.{number}"
            match block.type:
                case "text" if block.text is not None:
                    texts.append(block.text)
                case "thinking" if block.thinking is not None:
                    thoughts.append(block.thinking)
                case "tool_use" if None not in (block.id, block.name, block.input):
                    arguments = orjson.dumps(block.input).decode()
                    function = {"name": block.name, "arguments": arguments}
                    calls.append({"id": block.id, "type": "function", "function": function})
                case "text" | "thinking":
                    raise invalid_request(f"a {block.type} block needs {block.type}", place)
                case "tool_use":
                    raise invalid_request("a tool_use block needs id, name and input", place)
                case _:
                    self._ignore(f"{place}.type", "the model does not read these blocks")
        more: dict[str, Any] = {}
        if thoughts:
            more["reasoning_content"] = "\n".join(thoughts)
        if calls:
            more["tool_calls"] = calls
        self.add("assistant", texts, **more)


def _joined(content: Sequence[Content]) -> str | list[dict[str, Any]]:
    """Join texts; with images they become parts of a chat message."""
    texts = [part for part in content if isinstance(part, str)]
    if len(texts) == len(content):
        return "\n".join(texts)
    return [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]


def _as_error(content: list[Content]) -> list[Content]:
    """Mark the result of a tool that failed."""
    first = content[0] if content and isinstance(content[0], str) else None
    if first is not None and first.casefold().startswith("error"):
        return content
    return [f"Error: {first or ''}", *content[first is not None :]]


def _parts(content: str | Sequence[TextBlock | ResultBlock], path: str) -> list[Content]:
    if isinstance(content, str):
        return [content]
    return [_part(item, f"{path}.{number}") for number, item in enumerate(content)]


def _part(block: TextBlock | ResultBlock | UserBlock, path: str) -> Content:
    """Return the image of a content block, or its text with its title and source."""
    if not isinstance(block, TextBlock) and block.type == "image":
        return {"type": "image_url", "image_url": {"url": _image_url(block.source, path)}}
    return _text(block, path)


def _image_url(source: str | dict[str, Any] | None, path: str) -> str:
    match source:
        case {"type": "base64", "data": str(data)}:
            return f"data:;base64,{data}"
        case {"type": "url", "url": str(url)}:
            return url
        case {"type": "file"}:
            raise unsupported_field(
                "files are not read; send the image in base64", f"{path}.source"
            )
    raise invalid_request("an image needs a source of the type base64 or url", f"{path}.source")


def _text(block: TextBlock | ResultBlock | UserBlock, path: str) -> str:
    """Return the text of a content block, with its title and source."""
    if isinstance(block, TextBlock):
        return block.text
    source = block.source
    if block.type == "text" and block.text is not None:
        return block.text
    if block.type == "document" and isinstance(source, dict):
        text = _document(source)
        if text is None:
            kind = str(source.get("type"))[:80]
            raise unsupported_field(f"the model does not read documents of the type {kind}", path)
        return "\n".join(item for item in (block.title, block.context, text) if item)
    if block.type == "search_result" and isinstance(source, str) and block.content is not None:
        inner = _joined(_parts(block.content, f"{path}.content"))
        if not isinstance(inner, str):
            raise unsupported_field("images of search results are not read", f"{path}.content")
        return "\n".join(item for item in (block.title, source, inner) if item)
    if block.type in ("container_upload", "tool_reference"):
        raise unsupported_field(f"the model does not read {block.type}", path)
    needs = {"text": "text", "document": "source", "search_result": "source and content"}
    raise invalid_request(f"a {block.type} block needs {needs[block.type]}", path)


def _document(source: dict[str, Any]) -> str | None:
    """Return the text of a document's source; None without text."""
    match source:
        case {"type": "text", "data": str(data)} | {"type": "content", "content": str(data)}:
            return data
        case {"type": "content", "content": list(parts)}:
            texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
            known = [text for text in texts if isinstance(text, str)]
            return "\n".join(known) if len(known) == len(texts) else None
    return None


# Field of chat requests -> its name in the Messages API.
_NAMES = {
    "continue_final_message": "messages",
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
}


def field_name(field: str, body: ConversationFields) -> str:
    """Return the Messages API's name of a chat request's field."""
    if field == "stop" and isinstance(body, MessagesRequest) and body.stop_sequences is not None:
        return "stop_sequences"
    if field in ("response_format", "json_schema") and _format(body) is not None:
        return "output_format" if body.output_format is not None else "output_config.format"
    if field.startswith("tools."):
        field = field.replace(".function.parameters", ".input_schema", 1)
        return field.replace(".function.", ".", 1)
    return _NAMES.get(field, field.replace(".image_url", ".source"))

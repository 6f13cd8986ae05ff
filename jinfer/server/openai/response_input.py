"""Response input: translates items and earlier responses to a chat request."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from jinfer.server.core.chat_schemas import ChatRequest
from jinfer.server.core.prompt_builder import parse_arguments
from jinfer.server.core.sampling_fields import SamplingFields
from jinfer.server.http.http_errors import ApiError, invalid_request, unsupported_field
from jinfer.server.http.request_body import validated
from jinfer.server.openai.response_items import INPUT, PREFIX, custom_arguments
from jinfer.server.openai.response_schemas import (
    HOSTED_CALLS,
    LOGPROBS,
    AllowedTools,
    CustomTool,
    FunctionTool,
    InputItem,
    InputPart,
    NamedResponseTool,
    ResponseRequest,
)
from jinfer.server.stores.response_store import UNFINISHED, ResponseStore

_TEXTS = ("input_text", "output_text", "text", "refusal")


@dataclass(frozen=True)
class ResponseInput:
    """The input of a response.

    Attributes:
        earlier: items of the previous conversation.
        items: items of the request.
    """

    earlier: list[dict[str, Any]]
    items: list[InputItem]

    def listed(self) -> list[dict[str, Any]]:
        """Return all items in the stored format."""
        return [*self.earlier, *map(_listed, self.items)]


def read_input(body: ResponseRequest, store: ResponseStore) -> ResponseInput:
    """Read the items of a request and of the conversation that it continues. Slow.

    Raises:
        ApiError: the earlier response is missing or unfinished.
    """
    own = body.input
    if isinstance(own, str):
        own = [InputItem.model_validate({"role": "user", "content": own})] if own else []
    own = [_referenced(item, f"input.{i}.id", store) for i, item in enumerate(own)]
    if body.previous_response_id is None:
        return ResponseInput([], own)
    found = store.get(body.previous_response_id)
    if found is None:
        raise invalid_request(
            f"Previous response with id {body.previous_response_id[:80]!r} not found; "
            "send the whole conversation as input",
            "previous_response_id",
            "previous_response_not_found",
        )
    if (status := found.response["status"]) in (*UNFINISHED, "failed", "cancelled"):
        raise invalid_request(
            f"it is {status}; only a completed response can be continued", "previous_response_id"
        )
    return ResponseInput(found.conversation(), own)


def _referenced(item: InputItem, path: str, store: ResponseStore) -> InputItem:
    """Replace a reference by its item. Raises `ApiError`."""
    if item.type != "item_reference":
        return item
    if (found := store.item(item.id or "")) is None:
        message = f"no stored answer has the item {(item.id or '')[:80]!r}; send the whole item"
        raise invalid_request(message, path)
    return InputItem.model_validate(found)


def _listed(item: InputItem) -> dict[str, Any]:
    shown = item.model_dump(exclude_none=True, exclude_unset=True)
    shown = {"id": f"{PREFIX.get(item.type, item.type)}_{uuid.uuid4().hex}", **shown}
    shown["type"] = item.type
    if item.type == "message":
        shown["status"] = "completed"
        if isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            part: dict[str, Any] = {"type": kind, "text": item.content}
            if kind == "output_text":
                part["annotations"] = []
            shown["content"] = [part]
    return shown


def to_chat_request(
    body: ResponseRequest, response_input: ResponseInput, ignore: Callable[[str, str], None]
) -> ChatRequest:
    """Translate the request to a chat request. Raises `ApiError`."""
    chat: dict[str, Any] = {
        **{
            name: value
            for name, value in body.given_fields().items()
            if name in SamplingFields.model_fields
        },
        "model": body.model,  # may be the name of an adapter
        "messages": _messages(body.instructions, response_input, ignore),
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
        **chat_tools(body, ignore),
    }
    if LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.reasoning is not None:
        reasoning = body.reasoning
        chat["reasoning"] = {
            "effort": reasoning.effort,
            "max_tokens": reasoning.max_tokens,
            "enabled": reasoning.enabled,
        }
    if body.text is not None and (format := body.text.format) is not None:
        chat["response_format"] = {"type": format.type}
        if format.type == "json_schema":
            schema = {"name": format.name, "schema": format.schema_, "strict": format.strict}
            chat["response_format"]["json_schema"] = schema
    return validated({k: v for k, v in chat.items() if v is not None}, ChatRequest)


def _messages(
    instructions: str | None, response_input: ResponseInput, ignore: Callable[[str, str], None]
) -> list[dict[str, Any]]:
    """Translate items to chat messages; calls and reasoning join an assistant message."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item, path in _numbered(response_input):
        if item.type in HOSTED_CALLS:
            if not path.startswith("previous"):
                ignore(f"{path}.type", "another service ran the tool")
            continue
        entry = _message(item, path)
        last = messages[-1] if messages else {}
        if last.get("role") == entry["role"] == "assistant":
            calls = [*last.get("tool_calls", []), *entry.pop("tool_calls", [])]
            last.update({k: v for k, v in entry.items() if v or k not in last})
            if calls:
                last["tool_calls"] = calls
        else:
            messages.append(entry)
    if not messages:
        raise invalid_request("there is no message", "input")
    return messages


def _numbered(response_input: ResponseInput) -> Sequence[tuple[InputItem, str]]:
    """Return each item with its path."""
    try:
        earlier = [InputItem.model_validate(item) for item in response_input.earlier]
    except ValidationError:  # written by another version
        message = "the stored conversation cannot be read; send it as input"
        raise ApiError(400, message, param="previous_response_id") from None
    return [
        *((item, "previous_response_id") for item in earlier),
        *((item, f"input.{number}") for number, item in enumerate(response_input.items)),
    ]


def _message(item: InputItem, path: str) -> dict[str, Any]:
    match item.type:
        case "message":
            if item.role is None or item.content is None:
                raise invalid_request("a message needs role and content", path)
            return {"role": item.role, "content": _content(item.content, f"{path}.content")}
        case "function_call":
            if item.call_id is None or item.name is None:
                raise invalid_request("a function_call needs call_id and name", path)
            parse_arguments(item.arguments or "", f"{path}.arguments")
            return _called(item.call_id, item.name, item.arguments or "")
        case "custom_tool_call":
            if item.call_id is None or item.name is None:
                raise invalid_request("a custom_tool_call needs call_id and name", path)
            return _called(item.call_id, item.name, custom_arguments(item.input or ""))
        case "local_shell_call":
            if item.call_id is None or item.action is None:
                raise invalid_request("a local_shell_call needs call_id and action", path)
            return _called(item.call_id, "local_shell", json.dumps(item.action))
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
            id = item.call_id or (item.id if item.type == "local_shell_call_output" else None)
            if id is None:
                raise invalid_request(f"a {item.type} needs call_id", path)
            content = _content(item.output or "", f"{path}.output")
            return {"role": "tool", "tool_call_id": id, "content": content}
        case "reasoning":
            parts = item.content if isinstance(item.content, list) else []
            texts = [part.get("text") if isinstance(part, dict) else part.text for part in parts]
            thought = "".join(text for text in texts if isinstance(text, str))
            return {"role": "assistant", "content": "", "reasoning_content": thought}
    raise unsupported_field(f"items of the type {item.type} are not supported", f"{path}.type")


def _called(id: str, name: str, arguments: str) -> dict[str, Any]:
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _content(
    content: str | list[InputPart] | list[dict[str, Any]], path: str
) -> str | list[dict[str, Any]]:
    """Translate content: texts become one, with images parts of a chat message."""
    if isinstance(content, str):
        return content
    listed: Sequence[InputPart | dict[str, Any]] = content
    parts = [_part(part, f"{path}.{number}") for number, part in enumerate(listed)]
    if any(part["type"] == "image_url" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(part: InputPart | dict[str, Any], path: str) -> dict[str, Any]:
    if not isinstance(part, InputPart) or part.type not in (*_TEXTS, "input_image"):
        kind = part.type if isinstance(part, InputPart) else "this"
        raise unsupported_field(f"the model does not read {kind}", path)
    if part.type == "input_image":
        if part.image_url is None:
            raise unsupported_field("an image needs image_url; file_id is not read", path)
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise invalid_request(f"a part of the type {part.type} needs its text", path)
    return {"type": "text", "text": text}


def chat_tools(body: ResponseRequest, ignore: Callable[[str, str], None]) -> dict[str, Any]:
    """Translate `tools` and `tool_choice`. Raises `ApiError`."""
    chat: dict[str, Any] = {}
    choice, tools = body.tool_choice, list(body.tools or ())
    if isinstance(choice, AllowedTools):
        allowed = {tool.get("name") for tool in choice.tools}
        functions = [tool for tool in tools if isinstance(tool, FunctionTool | CustomTool)]
        tools = [tool for tool in functions if tool.name in allowed]
        if not tools:
            raise invalid_request("the request has none of these tools", "tool_choice.tools")
        chat["tool_choice"] = choice.mode
    elif isinstance(choice, NamedResponseTool):
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        chat["tool_choice"] = choice
    listed: list[Any] = []
    for number, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            without = {"type", "defer_loading"}
            function = tool.model_dump(exclude=without, exclude_none=True)
            listed.append({"type": "function", "function": function})
        elif isinstance(tool, CustomTool):
            if tool.format is not None and tool.format.type == "grammar":
                ignore(
                    f"tools.{number}.format", "the grammar is part of the prompt, but not enforced"
                )
            listed.append({"type": "function", "function": _as_function(tool)})
        else:
            listed.append(tool)
    return chat | ({"tools": listed} if listed else {})


def _as_function(tool: CustomTool) -> dict[str, Any]:
    about = tool.description or ""
    if tool.format is not None and tool.format.definition:
        about += f"\n\nThe input has this form ({tool.format.syntax}):\n{tool.format.definition}"
    schema = {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return {"name": tool.name, "description": about.strip(), "parameters": schema}

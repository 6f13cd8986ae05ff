"""Prompt builder: chat messages and texts of a request to token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import orjson

from jinfer.api.session import Frontend
from jinfer.engine.requests import RequestError
from jinfer.opening.chat_prompt import CONTINUE, Conversation
from jinfer.server.http_errors import ApiError, as_api_error, invalid, unsupported
from jinfer.server.ignored_fields import Ignore
from jinfer.server.schemas.chat import Message, Rendering, Tool, ToolCall
from jinfer.server.schemas.schema_base import MOST_PARTS
from jinfer.server.server_settings import Settings
from jinfer.server.tool_parsers.parser_registry import format_of
from jinfer.server.tool_parsers.prompted_tools import IN_SYSTEM, beside_system, written
from jinfer.server.tool_parsers.template_shape import shape_of, shaped, takes_system

# Variables that `Conversation.encode` sets itself; "special" would parse special tokens in
# messages.
_RESERVED = frozenset(
    {"messages", "tokenizer", "special", "tools", "documents", "add_generation_prompt", CONTINUE}
)


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def conversation_of(
    body: Rendering, frontend: Frontend, settings: Settings, ignore: Ignore
) -> tuple[Conversation, list[dict[str, Any]], dict[str, Any]]:
    """The chat template, messages and template variables of a request.

    Args:
        ignore: records variables that the template does not read.

    Raises:
        ApiError: the request has something that the model's template does not support.
    """
    conversation = frontend.opened.conversation
    if body.chat_template is not None:
        if not settings.request_templates:
            raise ApiError(403, "templates of requests are not allowed here", param="chat_template")
        prompt = replace(conversation.prompt, template="")
        conversation = replace(conversation, prompt=prompt, jinja=body.chat_template, tool_use=None)
    if functions_of(body) and body.tool_choice != "none":
        conversation = conversation.for_tools()
    variables = _variables(body, conversation, ignore)
    template = conversation.jinja or ""
    if body.documents:
        if not conversation.reads("documents"):
            raise unsupported("the model's chat template has no place for documents", "documents")
        variables["documents"] = body.documents
    tools = [] if body.tool_choice == "none" else list(map(_plain, functions_of(body)))
    if tools and conversation.reads("tools"):
        variables["tools"] = tools
    if not template and (body.continue_final_message or body.add_generation_prompt is False):
        name = "continue_final_message" if body.continue_final_message else "add_generation_prompt"
        raise unsupported("the model's prompt format always begins an answer", name)
    if body.continue_final_message:
        if body.messages[-1].role != "assistant":
            raise invalid("the last message is not the assistant's", "continue_final_message")
        if body.add_generation_prompt:
            raise invalid(
                "it cannot be used beside add_generation_prompt", "continue_final_message"
            )
        variables[CONTINUE] = True
    elif body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    messages = messages_of(body.messages, conversation)
    if tools or any("tool_calls" in one or one["role"] == "tool" for one in messages):
        messages = _with_calls(conversation, messages, tools)
    return conversation, messages, variables


def _variables(body: Rendering, conversation: Conversation, ignore: Ignore) -> dict[str, Any]:
    """The template variables besides the messages."""
    given = dict(body.chat_template_kwargs or {})
    places = {name: f"chat_template_kwargs.{name[:80]}" for name in given}
    if body.reasoning_effort is not None:
        given["reasoning_effort"] = body.reasoning_effort
        places["reasoning_effort"] = "reasoning_effort"
    for name in list(given):
        if name in _RESERVED:
            raise invalid(f"{name} has a field of its own", places[name])
        if not conversation.reads(name):
            ignore(places[name], f"the model's chat template does not read {name[:80]}")
            del given[name]
    return given


def functions_of(body: Rendering) -> list[Tool]:
    """The function tools of a request."""
    return [one for one in body.tools or () if isinstance(one, Tool)]


def _with_calls(
    conversation: Conversation, messages: list[dict[str, Any]], tools: list[Any]
) -> list[dict[str, Any]]:
    """Earlier tool calls as the template reads them; as text if it does not support them."""
    template = conversation.jinja or ""
    way = shape_of(template) if template else None
    if way is None or (tools and not conversation.reads("tools")):
        role = "system" if not template or takes_system(template) else "user"
        told = written(messages, [] if conversation.reads("tools") else tools, role)
        return beside_system(told, tools) if tools and IN_SYSTEM in template else told
    mistral = format_of(template, conversation.prompt.tool_calls).name == "mistral"
    return shaped(messages, way, short_ids=mistral)


def chat_ids(body: Rendering, frontend: Frontend, settings: Settings, ignore: Ignore) -> list[int]:
    """The token ids of a conversation. Raises `ApiError`, `TemplateError`."""
    conversation, messages, variables = conversation_of(body, frontend, settings, ignore)
    _can_chat(conversation)
    return conversation.encode(frontend.tokenizer, messages, **variables)


def chat_text(body: Rendering, frontend: Frontend, settings: Settings, ignore: Ignore) -> str:
    """The rendered text of a conversation. Raises `ApiError`, `TemplateError`."""
    conversation, messages, variables = conversation_of(body, frontend, settings, ignore)
    _can_chat(conversation)
    return conversation.text(frontend.tokenizer, messages, **variables)


def _can_chat(conversation: Conversation) -> None:
    if not conversation.has_template:
        raise invalid(
            "the model has no chat template; use /v1/completions, or set prompt.template",
            "messages",
        )


def messages_of(messages: Sequence[Message], conversation: Conversation) -> list[dict[str, Any]]:
    """Messages as chat templates read them."""
    return [_message(one, f"messages.{i}", conversation) for i, one in enumerate(messages)]


def _message(message: Message, place: str, conversation: Conversation) -> dict[str, Any]:
    role = message.role
    if role not in _ROLES and not conversation.has_role(role):
        known = ", ".join(_ROLES)
        raise invalid(
            f"{role[:80]!r} is none of {known}, nor named by the chat template", f"{place}.role"
        )
    if role == "developer" and not conversation.reads(role):
        role = "system"
    role = "tool" if role == "function" else role
    plain: dict[str, Any] = {"role": role, "content": _content(message, place)}
    thought = message.reasoning_content or message.reasoning
    given = {"name": message.name, "reasoning_content": thought}
    for name, value in {**given, "tool_call_id": message.tool_call_id}.items():
        if value is not None:
            plain[name] = value
    calls = list(message.tool_calls or ())
    where = [f"{place}.tool_calls.{i}.function" for i in range(len(calls))]
    if message.function_call is not None:
        calls.append(ToolCall(function=message.function_call))
        where.append(f"{place}.function_call")
    if calls:
        plain["tool_calls"] = list(map(_call, calls, where))
    return plain


def _call(call: ToolCall, place: str) -> dict[str, Any]:
    said = called_with(call.function.arguments, f"{place}.arguments")
    function = {"name": call.function.name, "arguments": said}
    return {"id": call.id, "type": "function", "function": function}


def called_with(text: str, place: str) -> dict[str, Any]:
    """The arguments of an earlier tool call as an object; templates write the JSON themselves.

    Servers write missing arguments as an empty string or null.

    Raises:
        ApiError: they are not an object.
    """
    try:
        said = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        said = text
    if said is None:
        return {}
    if not isinstance(said, dict):
        raise invalid("the arguments of a call are a JSON object, as a text", place)
    return said


def _content(message: Message, place: str) -> str:
    content = message.content
    if content is None and message.role in ("system", "developer", "user"):
        raise invalid(f"a message of the role {message.role} needs content", f"{place}.content")
    if content is None or isinstance(content, str):
        return content or message.refusal or ""
    texts = []
    for i, part in enumerate(content):
        text = part.text if part.type == "text" else part.refusal
        if part.type not in ("text", "refusal"):
            raise unsupported(f"the model does not read {part.type}", f"{place}.content.{i}")
        if text is None:
            raise invalid(
                f"a part of the type {part.type} needs {part.type}", f"{place}.content.{i}"
            )
        texts.append(text)
    return "\n".join(texts)


def _plain(tool: Tool) -> Any:
    """A tool as chat templates read it, without fields that are meant for servers."""
    without: Any = {"cache_control": True, "function": {"cache_control"}}
    return orjson.loads(tool.model_dump_json(exclude_unset=True, by_alias=True, exclude=without))


def prompts_of(
    given: str | Sequence[Any],
    frontend: Frontend,
    most: int,
    *,
    special: bool | None = None,
    param: str = "prompt",
) -> list[list[int]]:
    """The token ids of each prompt of a request: a text, a list of ids, or a list of either.

    Args:
        limit: the maximum number of prompts.
        special: whether to add special tokens (BOS, EOS); None: yes.
        param: the request field, for errors.

    Raises:
        ApiError: none or too many prompts, an id outside the vocabulary, a text without a
            tokenizer.
    """
    listed = [given] if is_one(given) else given
    if not listed:
        raise invalid("there is no prompt", param)
    if len(listed) > most:
        raise invalid(
            f"there are {len(listed)} prompts; at most {most} may come together", "prompt"
        )
    try:
        return [_ids(one, frontend, special is not False) for one in listed]
    except RequestError as error:
        raise as_api_error(error, param=param) from error


def is_one(given: str | Sequence[Any]) -> bool:
    """Whether a value is a single prompt: a text, or a list that contains an id."""
    return isinstance(given, str) or any(isinstance(part, int) for part in given)


def _ids(given: str | Sequence[Any], frontend: Frontend, special: bool) -> list[int]:
    if isinstance(given, str) and not special:
        return frontend.tokenizer.encode(given, special=False)
    if isinstance(given, str) or not any(isinstance(part, str) for part in given):
        return frontend.encode(cast("str | Sequence[int]", given))
    if len(given) > MOST_PARTS:
        message = f"a prompt of texts and ids has {len(given)} parts; at most {MOST_PARTS}"
        raise RequestError(message)
    ids: list[int] = []
    for part in given:
        if isinstance(part, str):
            ids += frontend.tokenizer.encode(part, special=special and not ids)
        else:
            ids += frontend.encode([part])
    return ids

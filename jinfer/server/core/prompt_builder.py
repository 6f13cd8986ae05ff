"""Prompt builder: chat messages and texts of a request to token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import orjson

from jinfer.api.session import Session
from jinfer.engine.requests import RequestError
from jinfer.opening.chat_prompt import CONTINUE, Conversation
from jinfer.server.core.chat_schemas import ChatTemplateFields, Message, Tool, ToolCall
from jinfer.server.core.thinking_choice import choose_thinking
from jinfer.server.http.http_errors import (
    ApiError,
    as_api_error,
    invalid_request,
    unsupported_field,
)
from jinfer.server.http.ignored_fields import Ignore
from jinfer.server.http.schema_base import MAX_ITEMS
from jinfer.server.http.server_settings import RESERVED_VARIABLES, ServerSettings
from jinfer.server.tool_parsers.parser_registry import tool_call_format
from jinfer.server.tool_parsers.template_shape import (
    IN_SYSTEM,
    accepts_system,
    convert_messages,
    detect_shape,
    tools_as_text,
    tools_in_system,
)

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def request_template(
    body: ChatTemplateFields, session: Session, settings: ServerSettings
) -> Conversation:
    """The chat template of a request: the model's, that for tools, or its own.

    Raises:
        ApiError: it brings one along, which is not allowed here.
    """
    conversation = session.opened.conversation
    if body.chat_template is not None:
        if not settings.request_templates:
            raise ApiError(403, "templates of requests are not allowed here", param="chat_template")
        prompt = replace(conversation.prompt, template="")
        conversation = replace(conversation, prompt=prompt, jinja=body.chat_template, tool_use=None)
    if function_tools(body) and body.tool_choice != "none":
        conversation = conversation.for_tools()
    return conversation


def _conversation(
    body: ChatTemplateFields, session: Session, settings: ServerSettings, ignore: Ignore
) -> tuple[Conversation, list[dict[str, Any]], dict[str, Any]]:
    """The chat template, messages and template variables of a request.

    Args:
        ignore: records variables that the template does not read.

    Raises:
        ApiError: the request has something that the model's template does not support.
    """
    conversation = request_template(body, session, settings)
    variables = _variables(body, conversation, session, settings, ignore)
    template = conversation.jinja or ""
    if body.documents:
        if not conversation.reads("documents"):
            raise unsupported_field(
                "the model's chat template has no place for documents", "documents"
            )
        variables["documents"] = body.documents
    tools = [] if body.tool_choice == "none" else list(map(_plain, function_tools(body)))
    if tools and conversation.reads("tools"):
        variables["tools"] = tools
    if not template and (body.continue_final_message or body.add_generation_prompt is False):
        name = "continue_final_message" if body.continue_final_message else "add_generation_prompt"
        raise unsupported_field("the model's prompt format always begins an answer", name)
    if body.continue_final_message:
        if body.messages[-1].role != "assistant":
            raise invalid_request(
                "the last message is not the assistant's", "continue_final_message"
            )
        if body.add_generation_prompt:
            raise invalid_request(
                "it cannot be used beside add_generation_prompt", "continue_final_message"
            )
        variables[CONTINUE] = True
    elif body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    messages = template_messages(body.messages, conversation)
    if tools or any("tool_calls" in one or one["role"] == "tool" for one in messages):
        messages = _with_calls(conversation, messages, tools)
    if not conversation.has_template:
        raise invalid_request(
            "the model has no chat template; use /v1/completions, or set prompt.template",
            "messages",
        )
    return conversation, messages, variables


def _variables(
    body: ChatTemplateFields,
    conversation: Conversation,
    session: Session,
    settings: ServerSettings,
    ignore: Ignore,
) -> dict[str, Any]:
    """The template variables besides the messages: the server's, below the request's."""
    given = dict(body.chat_template_kwargs or {})
    chosen = choose_thinking(body, conversation, session.opened)
    for name in list(given):
        place = f"chat_template_kwargs.{name[:80]}"
        if name in RESERVED_VARIABLES:
            raise invalid_request(f"{name} has a field of its own", place)
        if not conversation.reads(name):
            if name not in chosen.followed:
                ignore(place, f"the model's chat template does not read {name[:80]}")
            del given[name]
    for name, why in chosen.unused.items():
        ignore(name, why)
    defaults = settings.template_variables.items()
    below = {name: value for name, value in defaults if conversation.reads(name)}
    return {**below, **chosen.variables, **given}


def function_tools(body: ChatTemplateFields) -> list[Tool]:
    """The function tools of a request."""
    return [one for one in body.tools or () if isinstance(one, Tool)]


def _with_calls(
    conversation: Conversation, messages: list[dict[str, Any]], tools: list[Any]
) -> list[dict[str, Any]]:
    """Earlier tool calls as the template reads them; as text if it does not support them."""
    template = conversation.jinja or ""
    way = detect_shape(template) if template else None
    if way is None or (tools and not conversation.reads("tools")):
        role = "system" if not template or accepts_system(template) else "user"
        told = tools_as_text(messages, [] if conversation.reads("tools") else tools, role)
        return tools_in_system(told, tools) if tools and IN_SYSTEM in template else told
    mistral = tool_call_format(template, conversation.prompt.tool_calls).name == "mistral"
    return convert_messages(messages, way, short_ids=mistral)


def chat_prompt_ids(
    body: ChatTemplateFields, session: Session, settings: ServerSettings, ignore: Ignore
) -> list[int]:
    """The token ids of a conversation. Raises `ApiError`, `TemplateError`."""
    conversation, messages, variables = _conversation(body, session, settings, ignore)
    return conversation.encode(session.tokenizer, messages, **variables)


def chat_prompt_text(
    body: ChatTemplateFields, session: Session, settings: ServerSettings, ignore: Ignore
) -> str:
    """The rendered text of a conversation. Raises `ApiError`, `TemplateError`."""
    conversation, messages, variables = _conversation(body, session, settings, ignore)
    return conversation.text(session.tokenizer, messages, **variables)


def template_messages(
    messages: Sequence[Message], conversation: Conversation
) -> list[dict[str, Any]]:
    """Messages as chat templates read them."""
    return [_message(one, f"messages.{i}", conversation) for i, one in enumerate(messages)]


def _message(message: Message, path: str, conversation: Conversation) -> dict[str, Any]:
    role = message.role
    if role not in _ROLES and not conversation.has_role(role):
        known = ", ".join(_ROLES)
        raise invalid_request(
            f"{role[:80]!r} is none of {known}, nor named by the chat template", f"{path}.role"
        )
    if role == "developer" and not conversation.reads(role):
        role = "system"
    role = "tool" if role == "function" else role
    plain: dict[str, Any] = {"role": role, "content": _content(message, path)}
    thought = message.reasoning_content or message.reasoning
    given = {"name": message.name, "reasoning_content": thought}
    for name, value in {**given, "tool_call_id": message.tool_call_id}.items():
        if value is not None:
            plain[name] = value
    calls = list(message.tool_calls or ())
    where = [f"{path}.tool_calls.{i}.function" for i in range(len(calls))]
    if message.function_call is not None:
        calls.append(ToolCall(function=message.function_call))
        where.append(f"{path}.function_call")
    if calls:
        plain["tool_calls"] = list(map(_call, calls, where))
    return plain


def _call(call: ToolCall, path: str) -> dict[str, Any]:
    said = parse_arguments(call.function.arguments, f"{path}.arguments")
    function = {"name": call.function.name, "arguments": said}
    return {"id": call.id, "type": "function", "function": function}


def parse_arguments(text: str, path: str) -> dict[str, Any]:
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
        raise invalid_request("the arguments of a call are a JSON object, as a text", path)
    return said


def _content(message: Message, path: str) -> str:
    content = message.content
    if content is None and message.role in ("system", "developer", "user"):
        raise invalid_request(
            f"a message of the role {message.role} needs content", f"{path}.content"
        )
    if content is None or isinstance(content, str):
        return content or message.refusal or ""
    texts = []
    for i, part in enumerate(content):
        text = part.text if part.type == "text" else part.refusal
        if part.type not in ("text", "refusal"):
            raise unsupported_field(f"the model does not read {part.type}", f"{path}.content.{i}")
        if text is None:
            raise invalid_request(
                f"a part of the type {part.type} needs {part.type}", f"{path}.content.{i}"
            )
        texts.append(text)
    return "\n".join(texts)


def _plain(tool: Tool) -> Any:
    """A tool as chat templates read it, without fields that are meant for servers."""
    without: Any = {"cache_control": True, "function": {"cache_control"}}
    return orjson.loads(tool.model_dump_json(exclude_unset=True, by_alias=True, exclude=without))


def prompt_ids(
    prompts: str | Sequence[Any],
    session: Session,
    limit: int,
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
    listed = [prompts] if is_single_prompt(prompts) else prompts
    check_prompt_count(listed, limit, param)
    try:
        return [_ids(one, session, special is not False) for one in listed]
    except RequestError as error:
        raise as_api_error(error, param=param) from error


def check_prompt_count(prompts: Sequence[Any], limit: int, param: str) -> None:
    """Raises `ApiError` if there is no prompt, or too many."""
    if not prompts:
        raise invalid_request("there is no prompt", param)
    if len(prompts) > limit:
        raise invalid_request(
            f"there are {len(prompts)} prompts; at most {limit} may come together", "prompt"
        )


def is_single_prompt(prompts: str | Sequence[Any]) -> bool:
    """Whether a value is a single prompt: a text, or a list that contains an id."""
    return isinstance(prompts, str) or any(isinstance(part, int) for part in prompts)


def _ids(prompt: str | Sequence[Any], session: Session, special: bool) -> list[int]:
    if isinstance(prompt, str) and not special:
        return session.tokenizer.encode(prompt, special=False)
    if isinstance(prompt, str) or not any(isinstance(part, str) for part in prompt):
        return session.encode(cast("str | Sequence[int]", prompt))
    if len(prompt) > MAX_ITEMS:
        message = f"a prompt of texts and ids has {len(prompt)} parts; at most {MAX_ITEMS}"
        raise RequestError(message)
    ids: list[int] = []
    for part in prompt:
        if isinstance(part, str):
            ids += session.tokenizer.encode(part, special=special and not ids)
        else:
            ids += session.encode([part])
    return ids

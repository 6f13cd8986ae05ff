"""How what a request has becomes the tokens of a prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from jinfer.engine.requests import RequestError
from jinfer.frontend import Frontend
from jinfer.opening.conversation import CONTINUE, Conversation
from jinfer.server.errors import ApiError, as_api_error, invalid, unsupported
from jinfer.server.schemas.chat import Message, Rendering, Tool
from jinfer.server.settings import Settings
from jinfer.server.tools.formats import format_of
from jinfer.server.tools.shape import shape_of, shaped
from jinfer.server.tools.written import IN_SYSTEM, beside_system, written

# What `Conversation.encode` takes itself; "special" would make a stranger's words count.
_RESERVED = frozenset(
    {"messages", "tokenizer", "special", "tools", "documents", "add_generation_prompt", CONTINUE}
)


def conversation_of(
    body: Rendering, frontend: Frontend, settings: Settings
) -> tuple[Conversation, list[dict[str, Any]], dict[str, Any]]:
    """The template, the messages and the variables of a conversation.

    Raises:
        ApiError: something in it that this model's template has no place for.
    """
    conversation = frontend.opened.conversation
    if body.chat_template is not None:
        if not settings.request_templates:
            raise ApiError(403, "templates of requests are not allowed here", param="chat_template")
        prompt = replace(conversation.prompt, template="")
        conversation = replace(conversation, prompt=prompt, jinja=body.chat_template, tool_use=None)
    if body.tools and body.tool_choice != "none":
        conversation = conversation.for_tools()
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    template = conversation.jinja or ""
    for name in variables:
        if name in _RESERVED or name not in template:
            known = name == "reasoning_effort"
            raise invalid(
                f"the model's chat template does not read {name[:80]}",
                name if known else f"chat_template_kwargs.{name[:80]}",
            )
    if body.documents:
        if "documents" not in template:
            raise unsupported("the model's chat template has no place for documents", "documents")
        variables["documents"] = body.documents
    tools = [_plain(one) for one in body.tools or () if body.tool_choice != "none"]
    if tools and "tools" in template:
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
    messages = messages_of(body.messages)
    if tools or any("tool_calls" in one or one["role"] == "tool" for one in messages):
        messages = _with_calls(conversation, messages, tools)
    return conversation, messages, variables


def _with_calls(
    conversation: Conversation, messages: list[dict[str, Any]], tools: list[Any]
) -> list[dict[str, Any]]:
    """Messages with calls as the template wants them; in words where it has no place for them."""
    template = conversation.jinja or ""
    way = shape_of(template) if template else None
    if way is None or (tools and "tools" not in template):
        told = written(messages, [] if "tools" in template else tools)
        return beside_system(told, tools) if tools and IN_SYSTEM in template else told
    mistral = format_of(template, conversation.prompt.tool_calls).name == "mistral"
    return shaped(messages, way, short_ids=mistral)


def chat_ids(body: Rendering, frontend: Frontend, settings: Settings) -> list[int]:
    """The tokens of a conversation. Raises `ApiError`, `TemplateError`."""
    conversation, messages, variables = conversation_of(body, frontend, settings)
    _can_chat(conversation)
    return conversation.encode(frontend.tokenizer, messages, **variables)


def chat_text(body: Rendering, frontend: Frontend, settings: Settings) -> str:
    """The text of a conversation. Raises `ApiError`, `TemplateError`."""
    conversation, messages, variables = conversation_of(body, frontend, settings)
    _can_chat(conversation)
    return conversation.text(frontend.tokenizer, messages, **variables)


def _can_chat(conversation: Conversation) -> None:
    if not conversation.has_template:
        raise invalid(
            "the model has no chat template; use /v1/completions, or set prompt.template",
            "messages",
        )


def messages_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates read them."""
    return [_message(one, f"messages.{i}") for i, one in enumerate(messages)]


def _message(message: Message, place: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message, place)}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return plain


def _arguments(text: str) -> Any:
    """Templates write arguments as JSON themselves, so that they want what the text says."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _content(message: Message, place: str) -> str:
    content = message.content
    if content is None and message.role in ("system", "developer", "user", "tool"):
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
    """What templates read of a tool: what was sent."""
    return orjson.loads(tool.model_dump_json(exclude_unset=True, by_alias=True))


def prompts_of(
    given: str | Sequence[Any],
    frontend: Frontend,
    most: int,
    *,
    special: bool | None = None,
    param: str = "prompt",
) -> list[list[int]]:
    """The tokens of each prompt of a request: a text, ids, or a list of either.

    Args:
        most: prompts that a request may have.
        special: whether the tokenizer puts around a text what the model wants; None: it does.
        param: the field that they are in.

    Raises:
        ApiError: none or too many, an id outside of the vocabulary, a text without a tokenizer.
    """
    listed = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
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


def _ids(given: str | Sequence[int], frontend: Frontend, special: bool) -> list[int]:
    if isinstance(given, str) and not special:
        return frontend.tokenizer.encode(given, special=False)
    return frontend.encode(given)

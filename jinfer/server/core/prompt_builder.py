"""Prompt builder: chat messages and texts of a request to token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import orjson

from jinfer.api.generation_requests import with_fim_ends
from jinfer.api.image_inputs import EncodedPrompt, encode_conversation
from jinfer.api.session import Session
from jinfer.api.user_errors import USER_ERRORS
from jinfer.engine.requests import RequestError
from jinfer.server.core.chat_schemas import (
    ChatTemplateFields,
    ContentPart,
    Message,
    Tool,
    ToolCall,
)
from jinfer.server.core.image_parts import ImageParts
from jinfer.server.core.request_params import RequestOptions
from jinfer.server.core.thinking_choice import ThinkingChoice, choose_thinking
from jinfer.server.http.http_errors import (
    ApiError,
    as_api_error,
    invalid_request,
    unsupported_field,
)
from jinfer.server.http.request_body import Ignore
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
from jinfer.template.chat_prompt import CONTINUE, Conversation
from jinfer.template.message_content import images_as_text
from jinfer.tokenizer import Tokenizer, TokenizerError
from jinfer.tokenizer.fill_in_middle import infill_prompt

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation that is ready to be rendered.

    Attributes:
        template: the chat template of the request.
        thinking: whether the model thinks, and how long.
        messages: the messages as the template reads them.
        variables: the other variables of the template.
        tokenizer: the model's tokenizer.
        images: the images of the messages, in order.
    """

    template: Conversation
    thinking: ThinkingChoice
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    tokenizer: Tokenizer
    images: list[bytes]

    def encoded(self) -> EncodedPrompt:
        """Render the tokens of the prompt, with its images. Raises `ApiError`."""
        encode = partial(encode_conversation, self.template, images=self.images)
        return self._rendered(encode)

    def ids(self) -> list[int]:
        """Render the token ids of the prompt. Raises `ApiError`."""
        return self.encoded().ids

    def text(self) -> str:
        """Render the text of the prompt. Raises `ApiError`."""
        return self._rendered(self.template.text)

    def _rendered[T](self, render: Callable[..., T]) -> T:
        try:
            return render(self.tokenizer, self.messages, **self.variables)
        except USER_ERRORS as error:
            raise as_api_error(error, param="messages") from error


def build_chat_prompt(
    chat: ChatTemplateFields, session: Session, settings: ServerSettings, ignore: Ignore
) -> ChatPrompt:
    """Choose the template, the thinking and the variables of a conversation.

    Args:
        ignore: records fields and variables that have no effect.

    Raises:
        ApiError: the template does not support a field of the request.
    """
    template = _chat_template(chat, session.opened.conversation, settings)
    thinking = choose_thinking(chat, template, session.opened)
    variables = _variables(chat, template, thinking, settings, ignore)
    if chat.documents:
        if not template.reads("documents"):
            raise unsupported_field(
                "the model's chat template has no place for documents", "documents"
            )
        variables["documents"] = chat.documents
    tools = [_plain(tool) for tool in callable_tools(chat)]
    if tools and template.reads("tools"):
        variables["tools"] = tools
    variables |= _answer_start(chat, template)
    images = ImageParts(settings, template.image is not None)
    messages = template_messages(chat.messages, template, images)
    if tools or any("tool_calls" in message or message["role"] == "tool" for message in messages):
        messages = _with_calls(template, messages, tools)
    if not template.has_template:
        raise invalid_request(
            "the model has no chat template; use /v1/completions, or set prompt.template",
            "messages",
        )
    tokenizer = session.tokenizer
    return ChatPrompt(template, thinking, messages, variables, tokenizer, images.images)


def _chat_template(
    chat: ChatTemplateFields, template: Conversation, settings: ServerSettings
) -> Conversation:
    """Return the chat template of a request: its own, the model's for tools, or the model's.

    Raises:
        ApiError: the request has a template, and the server does not allow that.
    """
    if chat.chat_template is not None:
        if not settings.request_templates:
            raise ApiError(
                403, "the server does not allow templates in requests", param="chat_template"
            )
        prompt = replace(template.prompt, template="")
        template = replace(template, prompt=prompt, jinja=chat.chat_template, tool_use=None)
    return template.for_tools() if callable_tools(chat) else template


def _answer_start(chat: ChatTemplateFields, template: Conversation) -> dict[str, Any]:
    """Return the variables that say how the answer begins. Raises `ApiError`."""
    goes_on = bool(chat.continue_final_message)
    if not template.jinja and (goes_on or chat.add_generation_prompt is False):
        name = "continue_final_message" if goes_on else "add_generation_prompt"
        raise unsupported_field("the model's prompt format always begins an answer", name)
    if not goes_on:
        begins = chat.add_generation_prompt
        return {} if begins is None else {"add_generation_prompt": begins}
    if chat.messages[-1].role != "assistant":
        raise invalid_request("the last message is not the assistant's", "continue_final_message")
    if chat.add_generation_prompt:
        raise invalid_request(
            "it cannot be used together with add_generation_prompt", "continue_final_message"
        )
    return {CONTINUE: True}


def _variables(
    chat: ChatTemplateFields,
    template: Conversation,
    thinking: ThinkingChoice,
    settings: ServerSettings,
    ignore: Ignore,
) -> dict[str, Any]:
    """Return the template variables of a request, over those of the server. Raises `ApiError`."""
    variables = dict(chat.chat_template_kwargs or {})
    for name in list(variables):
        path = f"chat_template_kwargs.{name[:80]}"
        if name in RESERVED_VARIABLES:
            raise invalid_request(f"{name} has a field of its own", path)
        if not template.reads(name):
            if name not in thinking.followed:
                ignore(path, f"the model's chat template does not read {name[:80]}")
            del variables[name]
    for name, reason in thinking.unused.items():
        ignore(name, reason)
    defaults = settings.template_variables.items()
    defaults_read = {name: value for name, value in defaults if template.reads(name)}
    return {**defaults_read, **thinking.variables, **variables}


def callable_tools(chat: ChatTemplateFields) -> list[Tool]:
    """Return the function tools that the answer may call."""
    if chat.tool_choice == "none":
        return []
    return [tool for tool in chat.tools or () if isinstance(tool, Tool)]


def _with_calls(
    template_: Conversation, messages: list[dict[str, Any]], tools: list[Any]
) -> list[dict[str, Any]]:
    """Convert earlier tool calls to the template's form, or to text without such a form."""
    template = template_.jinja or ""
    way = detect_shape(template) if template else None
    if way is None or (tools and not template_.reads("tools")):
        role = "system" if not template or accepts_system(template) else "user"
        listed = [] if template_.reads("tools") else tools
        with_text = tools_as_text(images_as_text(messages), listed, role)
        return tools_in_system(with_text, tools) if tools and IN_SYSTEM in template else with_text
    mistral = tool_call_format(template, template_.prompt.tool_calls).name == "mistral"
    return convert_messages(messages, way, short_ids=mistral)


def template_messages(
    messages: Sequence[Message], conversation: Conversation, images: ImageParts
) -> list[dict[str, Any]]:
    """Convert messages to the form that chat templates read, and collect their images."""
    return [
        _message(message, f"messages.{i}", conversation, images)
        for i, message in enumerate(messages)
    ]


def _message(
    message: Message, path: str, conversation: Conversation, images: ImageParts
) -> dict[str, Any]:
    role = message.role
    if role not in _ROLES and not conversation.has_role(role):
        known = ", ".join(_ROLES)
        raise invalid_request(
            f"{role[:80]!r} is not among {known}, and the chat template does not name it",
            f"{path}.role",
        )
    if role == "developer" and not conversation.reads(role):
        role = "system"
    role = "tool" if role == "function" else role
    plain: dict[str, Any] = {"role": role, "content": _content(message, path, images)}
    thought = message.reasoning_content or message.reasoning
    optional = {"name": message.name, "reasoning_content": thought}
    for name, value in {**optional, "tool_call_id": message.tool_call_id}.items():
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
    arguments = parse_arguments(call.function.arguments, f"{path}.arguments")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def parse_arguments(text: str, path: str) -> dict[str, Any]:
    """Parse the arguments of an earlier tool call; templates serialize them again.

    Servers write missing arguments as an empty string or null.

    Raises:
        ApiError: they are not an object.
    """
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = text
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid_request("the arguments of a call must be a JSON object, as a string", path)
    return value


def _content(message: Message, path: str, images: ImageParts) -> str | list[dict[str, Any]]:
    content = message.content
    if content is None and message.role in ("system", "developer", "user"):
        raise invalid_request(
            f"a message of the role {message.role} needs content", f"{path}.content"
        )
    if content is None or isinstance(content, str):
        return content or message.refusal or ""
    before = len(images.images)
    parts = [_part(part, f"{path}.content.{i}", images) for i, part in enumerate(content)]
    if len(images.images) > before:
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(part: ContentPart, path: str, images: ImageParts) -> dict[str, Any]:
    """Convert a part of a message to the form that chat templates read."""
    if part.type not in ("text", "refusal", "image_url"):
        raise unsupported_field(f"the model does not read {part.type}", path)
    if (value := getattr(part, part.type)) is None:
        raise invalid_request(f"a part of the type {part.type} needs {part.type}", path)
    if part.type != "image_url":
        return {"type": "text", "text": value}
    images.add(value.url, f"{path}.image_url")
    return {"type": "image"}


def _plain(tool: Tool) -> Any:
    """Convert a tool to the form that chat templates read, without fields for servers."""
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
    """Tokenize the prompts of a request: a text, a list of ids, or a list of either.

    Args:
        limit: the maximum number of prompts.
        special: whether to add special tokens (BOS, EOS); None: yes.
        param: the request field, for errors.

    Raises:
        ApiError: no prompt, too many prompts, an id outside the vocabulary, or a text for a model
            without a tokenizer.
    """
    listed = [prompts] if is_single_prompt(prompts) else prompts
    check_prompt_count(listed, limit, param)
    try:
        return [_ids(item, session, special is not False) for item in listed]
    except RequestError as error:
        raise as_api_error(error, param=param) from error


def check_prompt_count(prompts: Sequence[Any], limit: int, param: str) -> None:
    """Raise `ApiError` if there is no prompt, or too many."""
    if not prompts:
        raise invalid_request("there is no prompt", param)
    if len(prompts) > limit:
        raise invalid_request(
            f"there are {len(prompts)} prompts; a request may have {limit}", "prompt"
        )


def is_single_prompt(prompts: str | Sequence[Any]) -> bool:
    """Return whether a value is a single prompt: a text, or a list that contains an id."""
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


def infill_ids(
    prompts: str | Sequence[Any], suffix: str, session: Session, limit: int
) -> list[list[int]]:
    """Tokenize prompts for filling in the middle before a suffix. Raises `ApiError`."""
    listed = [prompts] if is_single_prompt(prompts) else prompts
    check_prompt_count(listed, limit, "prompt")
    texts = [item if isinstance(item, str) else session.encode(item) for item in listed]
    try:
        return [infill_prompt(session.tokenizer, item, suffix) for item in texts]
    except TokenizerError as error:
        raise _no_tokens(error, "suffix") from error


def fim_options(session: Session, sampling: RequestOptions) -> RequestOptions:
    """Add the FIM tokens to the stop tokens."""
    return replace(sampling, params=with_fim_ends(session, sampling.params))


def _no_tokens(error: TokenizerError, param: str) -> ApiError:
    return unsupported_field(str(error), param)

"""Template shape: the form in which a chat template reads tools and earlier tool calls.

Templates differ: some serialize arguments themselves and need an object; some insert the text as it
is; some show calls only in a message without content. Rendering a short conversation in each way
finds out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinfer.server.tool_parsers.json_formats import HERMES_CLOSE as CLOSE
from jinfer.server.tool_parsers.json_formats import HERMES_OPEN as OPEN
from jinfer.template import ChatTemplate, TemplateError

_WORD, _KEY = "zweiundvierzig", "wieviel"
_ID = "a1b2c3d4e"  # as Mistral's templates require
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "f",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "x"}},
            "required": ["x"],
        },
    },
}
_SEEN = (f'"{_KEY}": "{_WORD}"', f'"{_KEY}":"{_WORD}"')


@dataclass(frozen=True)
class CallShape:
    """The form of a message with tool calls.

    Attributes:
        json_text: arguments are JSON text, not an object.
        null_content: missing content is None, not "".
    """

    json_text: bool = False
    null_content: bool = False


@lru_cache(maxsize=32)
def detect_shape(template: str) -> CallShape | None:
    """Return the form that a template reads; None if it does not show calls in any form."""
    # Values in tags have no quotes, so the words alone are decisive.
    ways = [CallShape(text, empty) for text in (False, True) for empty in (False, True)]
    texts = {way: _try_shape(template, way) for way in ways}
    for seen in (_SEEN, (_WORD,)):
        for way, text in texts.items():
            if any(item in text for item in seen) and f"'{_KEY}'" not in text:
                return way
    return None


@lru_cache(maxsize=32)
def accepts_system(template: str) -> bool:
    """Return whether a template accepts a system message."""
    return _WORD in _rendered(
        template, [{"role": "system", "content": _WORD}, {"role": "user", "content": "?"}]
    )


def _try_shape(template: str, way: CallShape) -> str:
    function = {"name": "f", "arguments": {_KEY: _WORD}}
    call = {"id": _ID, "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": _ID, "name": "f", "content": "!"},
    ]
    return _rendered(template, convert_messages(messages, way))


def _rendered(template: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Render the prompt; "" if the template rejects the messages."""
    ready = ChatTemplate(template, variables={"bos_token": "", "eos_token": ""})
    for tools in (None, [_TOOL]):  # templates for tool use may require tools
        try:
            return ready.render(messages, tools=tools)
        except TemplateError:
            pass
    return ""


def convert_messages(
    messages: Sequence[Mapping[str, Any]], way: CallShape, *, short_ids: bool = False
) -> list[dict[str, Any]]:
    """Convert messages, whose arguments are objects, to the form that a template reads.

    Args:
        short_ids: convert call ids to nine letters and digits (Mistral).
    """
    return [_shaped(dict(message), way, short_ids) for message in messages]


def _shaped(message: dict[str, Any], way: CallShape, short_ids: bool) -> dict[str, Any]:
    if short_ids and "tool_call_id" in message:
        message["tool_call_id"] = _short(message["tool_call_id"])
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if way.json_text and not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        id = _short(call["id"]) if short_ids and call["id"] else call["id"]
        calls.append({**call, "id": id, "function": function})
    content = None if way.null_content and not message["content"] else message["content"]
    return {**message, "content": content, "tool_calls": calls}


def _short(id: str) -> str:
    if len(id) == len(_ID) and id.isascii() and id.isalnum():
        return id
    return hashlib.sha256(id.encode()).hexdigest()[: len(_ID)]


IN_SYSTEM = "message['tools']"  # found in a template that reads tools from a message

_ASKS = f"""You may call functions to answer the user. Here is what each takes, as a JSON schema:
<tools>
{{tools}}
</tools>
To call one, answer with its name and its arguments as JSON, between tags:
{OPEN}
{{{{"name": "…", "arguments": {{{{…}}}}}}}}
{CLOSE}"""


def tools_as_text(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    tools_role: str = "system",
) -> list[dict[str, Any]]:
    """Rewrite messages so that the template needs only roles and contents.

    Args:
        tools_role: the role whose first message describes the tools.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message["content"] or ""
        calls = [_call_text(item["function"]) for item in message.get("tool_calls", ())]
        text = "\n".join([*([content] if content else []), *calls])
        if role == "tool":
            role, text = "user", f"<tool_response>\n{content}\n</tool_response>"
            if found and found[-1].get("answers"):
                found[-1]["content"] += f"\n{text}"
                continue
        found.append({"role": role, "content": text})
        if message["role"] == "tool":
            found[-1]["answers"] = True
    for item in found:
        item.pop("answers", None)
    return _describe_tools(found, tools, tools_role) if tools else found


def tools_in_system(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Add the tools to the system message, where Phi-4-mini's template reads them."""
    listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    first, rest = {"role": "system", "content": ""}, [*messages]
    if rest and rest[0]["role"] == "system":
        first = dict(rest.pop(0))
    return [{**first, "tools": listed}, *map(dict, rest)]


def _call_text(function: Mapping[str, Any]) -> str:
    shown = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN}\n{json.dumps(shown, ensure_ascii=False)}\n{CLOSE}"


def _describe_tools(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], tools_role: str
) -> list[Any]:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _ASKS.format(tools=lines)
    if messages and messages[0]["role"] == tools_role:
        first, *rest = messages
        texts = [first["content"], text] if tools_role == "system" else [text, first["content"]]
        return [{**first, "content": "\n\n".join(texts)}, *rest]
    return [{"role": tools_role, "content": text}, *messages]

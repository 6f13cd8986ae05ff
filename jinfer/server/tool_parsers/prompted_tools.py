"""Prompted tool calling: tools as text, in Hermes' format, for templates without tool support."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinfer.server.tool_parsers.hermes import CLOSE, OPEN

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
    """Rewrites messages so that the template needs only roles and contents.

    Args:
        tools_role: the role whose first message describes the tools.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message["content"] or ""
        calls = [_call(one["function"]) for one in message.get("tool_calls", ())]
        text = "\n".join([*([content] if content else []), *calls])
        if role == "tool":
            role, text = "user", f"<tool_response>\n{content}\n</tool_response>"
            if found and found[-1].get("answers"):
                found[-1]["content"] += f"\n{text}"
                continue
        found.append({"role": role, "content": text})
        if message["role"] == "tool":
            found[-1]["answers"] = True
    for one in found:
        one.pop("answers", None)
    return _describe_tools(found, tools, tools_role) if tools else found


def tools_in_system(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Adds the tools to the system message, where Phi-4-mini's template reads them."""
    listed = json.dumps([one["function"] for one in tools], ensure_ascii=False)
    first, rest = {"role": "system", "content": ""}, [*messages]
    if rest and rest[0]["role"] == "system":
        first = dict(rest.pop(0))
    return [{**first, "tools": listed}, *map(dict, rest)]


def _call(function: Mapping[str, Any]) -> str:
    shown = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN}\n{json.dumps(shown, ensure_ascii=False)}\n{CLOSE}"


def _describe_tools(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], tools_role: str
) -> list[Any]:
    lines = "\n".join(json.dumps(one, ensure_ascii=False) for one in tools)
    text = _ASKS.format(tools=lines)
    if messages and messages[0]["role"] == tools_role:
        first, *rest = messages
        said = [first["content"], text] if tools_role == "system" else [text, first["content"]]
        return [{**first, "content": "\n\n".join(said)}, *rest]
    return [{"role": tools_role, "content": text}, *messages]

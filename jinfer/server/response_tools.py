"""Responses API tools: functions, and custom (freeform) tools as functions of one text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jinfer.server.http_errors import invalid_request
from jinfer.server.schemas.responses import (
    AllowedTools,
    CustomTool,
    FunctionTool,
    NamedResponseTool,
    ResponseRequest,
)

# The only argument of a custom tool, as the model is shown it.
INPUT = "input"


def custom_names(body: ResponseRequest) -> frozenset[str]:
    """The names of a request's custom tools."""
    return frozenset(one.name for one in body.tools or () if isinstance(one, CustomTool))


def custom_arguments(text: str) -> str:
    """A custom tool's input as the arguments of a function."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The input in a function's arguments; what is cut or no such object stays as it is."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    given = value.get(INPUT) if isinstance(value, dict) else None
    return given if isinstance(given, str) else arguments


def chat_tools(body: ResponseRequest, ignore: Callable[[str, str], None]) -> dict[str, Any]:
    """`tools` and `tool_choice` of the chat completion. Raises `ApiError`."""
    chat: dict[str, Any] = {}
    choice, tools = body.tool_choice, list(body.tools or ())
    if isinstance(choice, AllowedTools):
        allowed = {one.get("name") for one in choice.tools}
        functions = [one for one in tools if isinstance(one, FunctionTool | CustomTool)]
        tools = [one for one in functions if one.name in allowed]
        if not tools:
            raise invalid_request("none of them is a tool of this request", "tool_choice.tools")
        chat["tool_choice"] = choice.mode
    elif isinstance(choice, NamedResponseTool):
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        chat["tool_choice"] = choice
    listed: list[Any] = []
    for number, one in enumerate(tools):
        if isinstance(one, FunctionTool):
            without = {"type", "defer_loading"}
            function = one.model_dump(exclude=without, exclude_none=True)
            listed.append({"type": "function", "function": function})
        elif isinstance(one, CustomTool):
            if one.format is not None and one.format.type == "grammar":
                ignore(f"tools.{number}.format", "the model is told the grammar, not bound to it")
            listed.append({"type": "function", "function": _as_function(one)})
        else:
            listed.append(one)
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

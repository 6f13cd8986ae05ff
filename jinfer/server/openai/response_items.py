"""Responses API output items: messages, reasoning and function calls, and their stream events."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from jinfer.server.openai.response_schemas import (
    CustomTool,
    ResponseRequest,
)
from jinfer.server.tool_parsers.output_deltas import OutputDelta, ToolCallDelta

# The only argument of a custom tool in the prompt.
INPUT = "input"


def custom_names(body: ResponseRequest) -> frozenset[str]:
    """Return the names of a request's custom tools."""
    return frozenset(tool.name for tool in body.tools or () if isinstance(tool, CustomTool))


def custom_arguments(text: str) -> str:
    """Convert a custom tool's input to the arguments of a function."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the input in a function's arguments; other or incomplete arguments are unchanged."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


Kind = Literal["message", "reasoning", "function_call", "custom_tool_call"]
PREFIX: dict[str, str] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
_TEXT: dict[Kind, str] = {  # events of an item's text
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
_CALLS = ("function_call", "custom_tool_call")


@dataclass
class _OpenItem:
    """The item that is being streamed."""

    kind: Kind
    index: int
    call: ToolCallDelta = field(default_factory=lambda: ToolCallDelta(-1))
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = f"{PREFIX[self.kind]}_{uuid.uuid4().hex}"

    def place(self) -> dict[str, Any]:
        """Return the fields of an event that identify the item."""
        return {"item_id": self.id, "output_index": self.index}

    def part(self, done: bool) -> dict[str, Any]:
        """Return the only content part."""
        text = self.text if done else ""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self.logprobs if done else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def item(self, status: str) -> dict[str, Any]:
        """Return the item's JSON."""
        head = {"id": self.id, "type": self.kind, "status": status}
        done = status != "in_progress"
        match self.kind:
            case "message":
                return {**head, "role": "assistant", "content": [self.part(True)] if done else []}
            case "reasoning":
                return {**head, "summary": [], "content": [self.part(True)] if done else []}
        text = self.text if done else ""
        key = "arguments"
        if self.kind == "custom_tool_call":
            key, text = "input", custom_input(text)
        return {**head, "call_id": self.call.id, "name": self.call.name, key: text}


@dataclass
class ResponseItems:
    """Collects the output items of a response.

    Attributes:
        done: complete items.
        custom: names of custom tools, whose input is not streamed.
        reasoning_deltas: number of reasoning deltas, which approximates reasoning tokens.
    """

    done: list[dict[str, Any]] = field(default_factory=list)
    custom: frozenset[str] = frozenset()
    reasoning_deltas: int = 0
    _open: _OpenItem | None = None

    def push(self, delta: OutputDelta, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the events of a parsed delta."""
        current = self._open
        going = [c for c in delta.calls if current is not None and c.index == current.call.index]
        events = [event for call in going for event in self._called(call)]
        if delta.reasoning:
            self.reasoning_deltas += 1
            events += self._grow("reasoning", delta.reasoning)
        if delta.content or logprobs:
            events += self._grow("message", delta.content, logprobs)
        rest = [call for call in delta.calls if call not in going]
        return [*events, *(event for call in rest for event in self._called(call))]

    def _called(self, call: ToolCallDelta) -> list[dict[str, Any]]:
        """Return the events of a piece of a tool call."""
        current = self._open
        kind: Kind = "custom_tool_call" if call.name in self.custom else "function_call"
        if current is not None and current.call.index == call.index:
            kind = current.kind
        events = self._grow(kind, call.arguments, call=call)
        if call.end:
            events += self._end("completed" if call.end == "done" else "incomplete")
        return events

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the open item; add an empty message to an answer without items."""
        events: list[dict[str, Any]] = []
        if self._open is None and not self.done:
            events += self._begin("message", None)
        return [*events, *self._end(status)]

    def _grow(
        self,
        kind: Kind,
        text: str,
        logprobs: list[dict[str, Any]] | None = None,
        call: ToolCallDelta | None = None,
    ) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        current = self._open
        other = call is not None and current is not None and current.call.index != call.index
        if current is None or current.kind != kind or other:
            events += [*self._end("completed"), *self._begin(kind, call)]
        current = self._open
        assert current is not None, "a block is open"
        current.text += text
        current.logprobs += logprobs or []
        if kind == "custom_tool_call" or not (text or logprobs):
            return events
        event = {"type": f"{_TEXT[kind]}.delta", **current.place(), "delta": text}
        if kind not in _CALLS:
            event["content_index"] = 0
        if kind == "message":
            event["logprobs"] = logprobs or []
        return [*events, event]

    def _begin(self, kind: Kind, call: ToolCallDelta | None) -> list[dict[str, Any]]:
        self._open = item = _OpenItem(kind, len(self.done), call or ToolCallDelta(-1))
        added = {"output_index": item.index, "item": item.item("in_progress")}
        events = [{"type": "response.output_item.added", **added}]
        if kind not in _CALLS:
            place = {**item.place(), "content_index": 0}
            part = {"type": "response.content_part.added", **place, "part": item.part(False)}
            events.append(part)
        return events

    def _end(self, status: str) -> list[dict[str, Any]]:
        opened, self._open = self._open, None
        if opened is None:
            return []
        self.done.append(opened.item(status))
        text: dict[str, Any] = {"type": f"{_TEXT[opened.kind]}.done", **opened.place()}
        events = [text]
        if opened.kind == "function_call":
            text |= {"arguments": opened.text, "name": opened.call.name}
        elif opened.kind == "custom_tool_call":
            text_ = custom_input(opened.text)
            delta = {"type": f"{_TEXT[opened.kind]}.delta", **opened.place(), "delta": text_}
            text["input"] = text_
            events.insert(0, delta)
        else:
            text |= {"content_index": 0, "text": opened.text}
            place = {**opened.place(), "content_index": 0}
            events.append(
                {"type": "response.content_part.done", **place, "part": opened.part(True)}
            )
        if opened.kind == "message":
            text["logprobs"] = opened.logprobs
        ended = {"output_index": opened.index, "item": self.done[-1]}
        return [*events, {"type": "response.output_item.done", **ended}]

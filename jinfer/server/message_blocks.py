"""Content blocks of a message (Anthropic): text, thinking and tool_use, and their stream events."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from jinfer.server.output_deltas import OutputDelta, ToolCallDelta

Kind = Literal["text", "thinking", "tool_use"]


@dataclass
class _OpenBlock:
    """The block that is being streamed."""

    kind: Kind
    index: int
    call: ToolCallDelta | None
    text: str = ""

    def start(self) -> dict[str, Any]:
        """The block without content."""
        if self.call is not None:
            return {"type": self.kind, "id": self.call.id, "name": self.call.name, "input": {}}
        if self.kind == "thinking":
            return {"type": self.kind, "thinking": "", "signature": ""}
        return {"type": self.kind, "text": ""}

    def delta(self, text: str) -> dict[str, Any]:
        """More of its content."""
        match self.kind:
            case "text":
                return {"type": "text_delta", "text": text}
            case "thinking":
                return {"type": "thinking_delta", "thinking": text}
        return {"type": "input_json_delta", "partial_json": text}

    def block(self) -> dict[str, Any]:
        """The whole block."""
        match self.kind:
            case "text":
                return {"type": "text", "text": self.text}
            case "thinking":
                return {"type": "thinking", "thinking": self.text, "signature": self.signature()}
        return {**self.start(), "input": _arguments(self.text)}

    def signature(self) -> str:
        """Clients keep only thoughts that have a signature; nothing here checks it."""
        return hashlib.blake2b(self.text.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; {} if the token limit cut them."""
    try:
        said = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return said if isinstance(said, dict) else {}


@dataclass
class MessageBlocks:
    """The content blocks of a message so far.

    Attributes:
        done: complete blocks.
        called: whether one of them is a complete tool call.
    """

    done: list[dict[str, Any]] = field(default_factory=list)
    called: bool = False
    _open: _OpenBlock | None = None

    def push(self, delta: OutputDelta) -> list[dict[str, Any]]:
        """The events of a parsed delta."""
        going = [one for one in delta.calls if self._continues(one)]
        events = [event for call in going for event in self._call(call)]
        if delta.reasoning:
            events += self._grow("thinking", delta.reasoning)
        if delta.content:
            events += self._grow("text", delta.content)
        rest = [call for call in delta.calls if call not in going]
        return [*events, *(event for call in rest for event in self._call(call))]

    def close(self) -> list[dict[str, Any]]:
        """Ends the open block."""
        one, self._open = self._open, None
        if one is None:
            return []
        self.done.append(one.block())
        events: list[dict[str, Any]] = []
        if one.kind == "thinking":
            signed = {"type": "signature_delta", "signature": one.signature()}
            events.append({"type": "content_block_delta", "index": one.index, "delta": signed})
        return [*events, {"type": "content_block_stop", "index": one.index}]

    def _continues(self, call: ToolCallDelta) -> bool:
        known = None if self._open is None else self._open.call
        return known is not None and known.index == call.index

    def _call(self, call: ToolCallDelta) -> list[dict[str, Any]]:
        if call.end == "void" and not self._continues(call):
            return []
        events = self._grow("tool_use", call.arguments, call)
        self.called |= call.end == "done"
        return [*events, *(self.close() if call.end else [])]

    def _grow(
        self, kind: Kind, text: str, call: ToolCallDelta | None = None
    ) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        same = self._open is not None and self._open.kind == kind
        if not same or (call is not None and not self._continues(call)):
            events += self.close()
            self._open = _OpenBlock(kind, len(self.done), call)
            begun = {"index": self._open.index, "content_block": self._open.start()}
            events.append({"type": "content_block_start", **begun})
        current = self._open
        assert current is not None, "one was begun"
        current.text += text
        if text:
            more = {"index": current.index, "delta": current.delta(text)}
            events.append({"type": "content_block_delta", **more})
        return events

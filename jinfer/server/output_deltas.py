"""Output parser protocol: splits generated text into content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a tool call.

    Attributes:
        index: number of the call within the answer.
        id, name: set on its first piece.
        arguments: more of the arguments' JSON text.
        end: set on its last piece: "done" (complete), "cut" (the token limit cut its arguments), or
            "void" (it was no call after all; its text follows as content).
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    end: Literal["", "done", "cut", "void"] = ""


@dataclass(frozen=True)
class OutputDelta:
    """What a piece of text was parsed into.

    Attributes:
        content: more of the answer.
        reasoning: more of the reasoning before the answer.
        calls: pieces of tool calls.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class OutputParser(Protocol):
    """Parses one answer's text incrementally."""

    def push(self, text: str) -> OutputDelta:
        """Parses more text; returns what is certain and holds back the rest."""

    def finish(self, cut: bool = False) -> OutputDelta:
        """Returns what was held back, at the end of the answer.

        Args:
            cut: the token limit ended the answer.
        """


class PlainTextParser:
    """All text is content."""

    def push(self, text: str) -> OutputDelta:
        """The text as content."""
        return OutputDelta(content=text)

    def finish(self, cut: bool = False) -> OutputDelta:
        """Nothing is held back."""
        return OutputDelta()


class WholeCallsParser:
    """Holds each call back until it is complete, for responses that are not streamed."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._kept: list[ToolCallDelta] = []

    def push(self, text: str) -> OutputDelta:
        """As the wrapped parser, without incomplete calls."""
        return self._settled(self._parser.push(text))

    def finish(self, cut: bool = False) -> OutputDelta:
        """As the wrapped parser; no call is incomplete any more."""
        return self._settled(self._parser.finish(cut))

    def _settled(self, delta: OutputDelta) -> OutputDelta:
        ready: list[ToolCallDelta] = []
        for one in delta.calls:
            self._kept.append(one)
            if one.end:
                ready += [] if one.end == "void" else self._kept
                self._kept = []
        return replace(delta, calls=tuple(ready))


@dataclass(frozen=True)
class OutputParsing:
    """How the answers to a request are parsed.

    Attributes:
        parser: makes the parser of one answer.
        param_changes: changes to `SamplingParams`, such as a grammar that forces tool calls.
        shown_tokens: ids of special tokens that the parser needs to see in the text.
        constrained: makes the same for an answer that must match a JSON schema or be a tool call;
            None: such an answer is all content.
    """

    parser: Callable[[], OutputParser] = PlainTextParser
    param_changes: Mapping[str, Any] = field(default_factory=dict)
    shown_tokens: tuple[int, ...] = ()
    constrained: Callable[[Any], OutputParsing] | None = None


PLAIN_TEXT = OutputParsing()

"""Output deltas: generated text split into content, reasoning and tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a tool call.

    Attributes:
        index: number of the call within the answer.
        id, name: set on its first piece.
        arguments: more of the arguments' JSON text.
        end: set on its last piece: "done" (complete), "cut" (the token limit cut its arguments), or
            "void" (not a call; its text follows as content).
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    end: Literal["", "done", "cut", "void"] = ""


@dataclass(frozen=True)
class OutputDelta:
    """A parsed piece of text.

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
        """Parse more text; return the certain part and hold back the rest."""

    def finish(self, cut: bool = False) -> OutputDelta:
        """Return the held back part, at the end of the answer.

        Args:
            cut: the token limit ended the answer.
        """


class PlainTextParser:
    """All text is content."""

    def push(self, text: str) -> OutputDelta:
        """Return the text as content."""
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
        """Parse more text; return complete calls only."""
        return self._settled(self._parser.push(text))

    def finish(self, cut: bool = False) -> OutputDelta:
        """Parse the end of the answer; return complete calls only."""
        return self._settled(self._parser.finish(cut))

    def _settled(self, delta: OutputDelta) -> OutputDelta:
        ready: list[ToolCallDelta] = []
        for tool_call in delta.calls:
            self._kept.append(tool_call)
            if tool_call.end:
                ready += [] if tool_call.end == "void" else self._kept
                self._kept = []
        return replace(delta, calls=tuple(ready))


@dataclass
class ParsedAnswer:
    """One answer, parsed incrementally into content, reasoning and tool calls."""

    parser: OutputParser
    content: str = ""
    reasoning: str = ""
    calls: dict[int, ToolCallDelta] = field(default_factory=dict)
    started: bool = False

    def push(self, text: str) -> OutputDelta:
        """Parse more text."""
        return self._keep(self.parser.push(text))

    def finish(self, reason: str) -> OutputDelta:
        """Parse the end of the answer, given its finish reason."""
        return self._keep(self.parser.finish(reason == "length"))

    def _keep(self, delta: OutputDelta) -> OutputDelta:
        self.content += delta.content
        self.reasoning += delta.reasoning
        for tool_call in delta.calls:
            if tool_call.end == "void":
                self.calls.pop(tool_call.index, None)
                continue
            known = self.calls.get(tool_call.index, ToolCallDelta(tool_call.index))
            arguments = known.arguments + tool_call.arguments
            self.calls[tool_call.index] = ToolCallDelta(
                tool_call.index, known.id or tool_call.id, known.name or tool_call.name, arguments
            )
        return delta


@dataclass(frozen=True)
class OutputParsing:
    """The parsing of a request's answers.

    Attributes:
        parser: makes the parser of one answer.
        param_changes: changes to `SamplingParams`, such as a grammar that forces tool calls.
        shown_tokens: ids of special tokens that the parser needs to see in the text.
        constrained: creates the parsing of an answer that must match a JSON schema or be a tool
            call; None: such an answer is content only.
    """

    parser: Callable[[], OutputParser] = PlainTextParser
    param_changes: Mapping[str, Any] = field(default_factory=dict)
    shown_tokens: tuple[int, ...] = ()
    constrained: Callable[[Any], OutputParsing] | None = None


PLAIN_TEXT = OutputParsing()


def new_call_id() -> str:
    """Generate a call id in OpenAI's style."""
    return f"call_{uuid.uuid4().hex[:24]}"


class DeltaCollector:
    """Collects parsed pieces, without the white space around calls and reasoning."""

    def __init__(
        self, new_id: Callable[[], str] = new_call_id, max_calls: int | None = None
    ) -> None:
        """Begin an answer.

        Args:
            new_id: generates call ids.
            max_calls: maximum number of calls; further ones are dropped.
        """
        self._new_id = new_id
        self._max_calls = max_calls
        self._content, self._reasoning = "", ""
        self._calls: list[ToolCallDelta] = []
        self._index, self._whole = -1, 0
        self._gap = self._dropped = self._thought_gap = ""
        self._trim, self._trim_thought = False, True
        self._parted = ""  # separator between two reasoning blocks

    def content(self, text: str) -> None:
        """Add a piece of content."""
        text = self._gap + (text.lstrip() if self._trim else text)
        self._trim = self._trim and not text
        shown = text.rstrip()
        self._content += shown
        self._gap = text[len(shown) :]

    def reasoning(self, text: str) -> None:
        """Add a piece of reasoning."""
        if self._trim_thought:
            text = text.lstrip()
            if not text:
                return
            text, self._trim_thought, self._parted = self._parted + text, False, ""
        text = self._thought_gap + text
        shown = text.rstrip()
        self._reasoning += shown
        self._thought_gap = text[len(shown) :]

    def end_reasoning(self) -> None:
        """End a reasoning block."""
        self._thought_gap = ""
        self._parted = "" if self._trim_thought else "\n\n"
        self._trim = self._trim_thought = True

    def begin_call(self, name: str) -> None:
        """Begin a call."""
        self._dropped, self._gap = self._gap, ""
        self._index += 1
        self._add(ToolCallDelta(self._index, self._new_id(), name))

    def arguments(self, text: str) -> None:
        """Add a piece of the call's arguments."""
        if text:
            self._add(ToolCallDelta(self._index, arguments=text))

    def end_call(self) -> None:
        """End a complete call."""
        self._add(ToolCallDelta(self._index, end="done"))
        self._whole += 1
        self._dropped, self._trim = "", True

    def abort_call(self, reader: IncrementalReader) -> None:
        """End an incomplete call: it was cut by the limit, or its text becomes content."""
        if reader.cut:
            self._add(ToolCallDelta(self._index, end="cut"))
            reader.drop()
            return
        self._add(ToolCallDelta(self._index, end="void"))
        self._gap, self._dropped = self._dropped, ""

    def reject(self, reader: IncrementalReader, *, certain: bool = True) -> None:
        """Turn the text since the reader's mark into content, as it is not a call.

        A text that the limit cut is dropped, as it was probably a call.

        Args:
            certain: whether only a call begins like this.
        """
        if reader.cut and (certain or reader.bound):
            reader.drop()
        self.content(reader.raw())

    def end(self) -> None:
        """End the answer; trailing white space is content."""
        self._content += self._gap
        self._reasoning += self._thought_gap
        self._gap = self._thought_gap = ""

    def deltas(self) -> OutputDelta:
        """Return the deltas since the last call."""
        delta = OutputDelta(self._content, self._reasoning, tuple(_joined(self._calls)))
        self._content, self._reasoning, self._calls = "", "", []
        return delta

    def _add(self, tool_call: ToolCallDelta) -> None:
        if self._max_calls is None or self._whole < self._max_calls:
            self._calls.append(tool_call)


def _joined(calls: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """Merge the pieces of each call's arguments."""
    result: list[ToolCallDelta] = []
    for tool_call in calls:
        last = result[-1] if result else None
        if last is not None and last.index == tool_call.index and not last.end:
            arguments = last.arguments + tool_call.arguments
            result[-1] = ToolCallDelta(last.index, last.id, last.name, arguments, tool_call.end)
        else:
            result.append(tool_call)
    return result


class ToolCallParser:
    """Runs the parser of a format over an answer."""

    def __init__(
        self,
        read: Callable[[IncrementalReader, DeltaCollector], Parse[None]],
        output: DeltaCollector,
        *,
        bound: bool = False,
    ) -> None:
        """Begin an answer; `bound`: whether a grammar allows calls only."""
        self._reader, self._output = IncrementalReader(bound=bound), output
        self._reading = read(self._reader, output)

    def push(self, text: str) -> OutputDelta:
        """Parse more text; return the certain part."""
        self._reader.feed(text)
        next(self._reading, None)
        return self._output.deltas()

    def finish(self, cut: bool = False) -> OutputDelta:
        """Parse the rest, at the end of the answer."""
        self._reader.ended, self._reader.cut = True, cut
        next(self._reading, None)
        self._output.end()
        return self._output.deltas()

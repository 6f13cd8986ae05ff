"""What of a model's text is answer, what is reasoning, and what is a call of a tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class CallDelta:
    """A piece of a call of a tool.

    Attributes:
        index: which of the answer's calls.
        id, name: on its first piece.
        arguments: more of its JSON text.
        end: on its last piece: it is whole ("done"), has a part of its arguments because the limit
            cut the answer ("cut"), or turned out to be none ("void"); then its text comes as
            content.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    end: Literal["", "done", "cut", "void"] = ""


@dataclass(frozen=True)
class Delta:
    """What a piece of text turned out to be.

    Attributes:
        content: of the answer.
        reasoning: of what the model thought before it.
        calls: of tools.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Parser(Protocol):
    """Takes one answer's text as it comes."""

    def push(self, text: str) -> Delta:
        """What is certain once this text is known; what is not is kept."""

    def finish(self, cut: bool = False) -> Delta:
        """What was kept, at the answer's end.

        Args:
            cut: the limit of tokens ended it.
        """


class Plain:
    """All of it is the answer."""

    def push(self, text: str) -> Delta:
        """The text."""
        return Delta(content=text)

    def finish(self, cut: bool = False) -> Delta:
        """Nothing is kept."""
        return Delta()


class Settled:
    """Keeps each call back until it has ended, for answers that are shown whole."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._kept: list[CallDelta] = []

    def push(self, text: str) -> Delta:
        """As the parser has it, less what is open."""
        return self._settled(self._parser.push(text))

    def finish(self, cut: bool = False) -> Delta:
        """As the parser has it: nothing is open any more."""
        return self._settled(self._parser.finish(cut))

    def _settled(self, delta: Delta) -> Delta:
        ready: list[CallDelta] = []
        for one in delta.calls:
            self._kept.append(one)
            if one.end:
                ready += [] if one.end == "void" else self._kept
                self._kept = []
        return replace(delta, calls=tuple(ready))


@dataclass(frozen=True)
class Tooling:
    """How the answers to a request are read.

    Attributes:
        parser: makes one for each answer.
        changes: of `SamplingParams`: a constraint that makes calls come.
        shown: special tokens that the parser has to see in the text.
        bound: the same where the answer has to keep to a JSON schema, or be a call of a tool;
            without one, such an answer is all content.
    """

    parser: Callable[[], Parser] = Plain
    changes: Mapping[str, Any] = field(default_factory=dict)
    shown: tuple[int, ...] = ()
    bound: Callable[[Any], Tooling] | None = None

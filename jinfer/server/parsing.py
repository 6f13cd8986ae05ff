"""What of a model's text is answer, what is reasoning, and what is a call of a tool.

A route asks `tooling` once for each request. What that gives has a parser for each answer, and
what the sampler has to keep to so that a wanted call comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from jinfer.frontend import Frontend
from jinfer.server.errors import unsupported
from jinfer.server.schemas.chat import Rendering


@dataclass(frozen=True)
class CallDelta:
    """A piece of a call of a tool.

    Attributes:
        index: which of the answer's calls.
        id, name: on its first piece.
        arguments: more of its JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


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

    def finish(self) -> Delta:
        """What was kept, at the answer's end."""


class Plain:
    """All of it is the answer."""

    def push(self, text: str) -> Delta:
        """The text."""
        return Delta(content=text)

    def finish(self) -> Delta:
        """Nothing is kept."""
        return Delta()


@dataclass(frozen=True)
class Tooling:
    """How the answers to a request are read.

    Attributes:
        parser: makes one for each answer.
        changes: of `SamplingParams`: a constraint, or special tokens that the parser has to see.
    """

    parser: Callable[[], Parser] = Plain
    changes: Mapping[str, Any] = field(default_factory=dict)


def tooling(body: Rendering, parallel: bool, frontend: Frontend) -> Tooling:
    """Chooses how the answers to a request are read.

    Args:
        body: has the tools, and which of them is to be called.
        parallel: whether several may be called at once.
        frontend: of the model, whose chat template says how it writes calls.

    Raises:
        ApiError: it cannot be done with this model.
    """
    wanted = body.tool_choice
    if wanted is not None and wanted not in ("none", "auto"):
        raise unsupported("calls cannot be enforced with this model", "tool_choice")
    return Tooling()

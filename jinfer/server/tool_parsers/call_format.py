"""Tool-call format: the interface that each format's module implements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jinfer.server.tool_parsers.incremental_reader import Parse, Reader
from jinfer.server.tool_parsers.json_calls import Tools
from jinfer.server.tool_parsers.lark_grammar import Lark
from jinfer.server.tool_parsers.parsed_deltas import Output, call_id


@dataclass(frozen=True)
class Format:
    """The syntax of tool calls of a family of models.

    Attributes:
        name: the value of `prompt.tool_calls` in a specification.
        marks: texts that delimit calls, each of which may be a special token.
        parse: parses an answer to its end; calls of unknown tools are content.
        grammar: adds the rule of a call to a grammar, or of several calls if those are wanted and
            the format allows them; returns its expression. The third argument is the template.
        new_id: generates a call's id.
        answer: for a format with its own reasoning syntax, which `parse` reads: adds the rule of an
            answer with reasoning and this content.
    """

    name: str
    marks: tuple[str, ...]
    read: Callable[[Reader, Output, Tools], Parse[None]]
    grammar: Callable[[Lark, Tools, str, bool], str]
    new_id: Callable[[], str] = call_id
    answer: Callable[[Lark, str], str] | None = None

    @property
    def thinks(self) -> bool:
        """Whether the format has its own reasoning syntax."""
        return self.answer is not None


MOST_CALLS = 16  # that a grammar allows in an answer


def repeated(call: str, between: str = "") -> str:
    """One call or several."""
    return f"{call} ({between} {call}){{0,{MOST_CALLS - 1}}}"


def json_object(lark: Lark, name: str, key: str, schema: str, *, named: str = "name") -> str:
    """A call as a JSON object, with these keys for its name and arguments."""
    head = lark.text(f'{{"{named}": "{name}", "{key}": ')
    return f'{head} {schema} "}}"'

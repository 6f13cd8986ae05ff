"""What a format of calls is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jinfer.server.tool_parsers.incremental_reader import Reader, Reading
from jinfer.server.tool_parsers.json_calls import Tools
from jinfer.server.tool_parsers.lark_grammar import Lark
from jinfer.server.tool_parsers.parsed_deltas import Output, call_id


@dataclass(frozen=True)
class Format:
    """How a family of models writes calls.

    Attributes:
        name: what it is chosen by.
        marks: texts that mark calls, each of which may be a special token.
        read: reads an answer to its end; calls of other tools than these are content.
        grammar: adds to a grammar what is a call of one of the tools, or several where that is
            wanted and the format has them; gives the expression. The third is the template.
        new_id: names a call.
        answer: where it has its own way to write thoughts, which `read` knows: adds to a grammar
            an answer, thoughts and all, of this content.
    """

    name: str
    marks: tuple[str, ...]
    read: Callable[[Reader, Output, Tools], Reading[None]]
    grammar: Callable[[Lark, Tools, str, bool], str]
    new_id: Callable[[], str] = call_id
    answer: Callable[[Lark, str], str] | None = None

    @property
    def thinks(self) -> bool:
        """Whether it has its own way to write thoughts."""
        return self.answer is not None


MOST_CALLS = 16  # that a grammar lets an answer have


def repeated(call: str, between: str = "") -> str:
    """One call or several."""
    return f"{call} ({between} {call}){{0,{MOST_CALLS - 1}}}"


def json_object(lark: Lark, name: str, key: str, schema: str, *, named: str = "name") -> str:
    """A call as a JSON object, with these keys for its name and its arguments."""
    head = lark.text(f'{{"{named}": "{name}", "{key}": ')
    return f'{head} {schema} "}}"'

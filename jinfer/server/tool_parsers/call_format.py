"""Tool-call format: the interface that each format's module implements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse
from jinfer.server.tool_parsers.json_calls import Tools
from jinfer.server.tool_parsers.lark_grammar import LarkGrammar
from jinfer.server.tool_parsers.parsed_deltas import DeltaCollector, new_call_id


@dataclass(frozen=True)
class ToolCallFormat:
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
    parse: Callable[[IncrementalReader, DeltaCollector, Tools], Parse[None]]
    grammar: Callable[[LarkGrammar, Tools, str, bool], str]
    new_id: Callable[[], str] = new_call_id
    answer: Callable[[LarkGrammar, str], str] | None = None

    @property
    def has_reasoning(self) -> bool:
        """Whether the format has its own reasoning syntax."""
        return self.answer is not None


MAX_CALLS = 16  # that a grammar allows in an answer


def calls_rule(lark: LarkGrammar, calls: Iterable[str], several: bool, between: str = "") -> str:
    """One of these calls, or several of them."""
    return repeated(lark.one_of("call", calls), several, between)


def repeated(call: str, several: bool, between: str = "") -> str:
    """A call, or several with something between them."""
    return f"{call} ({between} {call}){{0,{MAX_CALLS - 1}}}" if several else call


def json_call_rule(
    lark: LarkGrammar, name: str, key: str, schema: str, *, named: str = "name"
) -> str:
    """A call as a JSON object, with these keys for its name and arguments."""
    head = lark.text(f'{{"{named}": "{name}", "{key}": ')
    return f'{head} {schema} "}}"'

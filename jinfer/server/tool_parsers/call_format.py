"""Tool-call format: the interface of a format, and building blocks of Lark grammars."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jinfer.sampling.structured.json_schema import prepare_schema
from jinfer.server.tool_parsers.incremental_reader import IncrementalReader, Parse
from jinfer.server.tool_parsers.json_calls import Tools
from jinfer.server.tool_parsers.output_deltas import DeltaCollector, new_call_id
from jinfer.tokenizer import Tokenizer

_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}}


class LarkGrammar:
    """A grammar to which rules are added.

    Attributes:
        tokenizer: names of its special tokens in texts become these tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._rules: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def __str__(self) -> str:
        return "\n".join(f"{head}: {body}" for head, body in self._rules.items())

    def rule(self, name: str, body: str, attributes: str = "") -> str:
        """Add a rule under a name, numbered if it is taken; return the name."""
        known = self._counts[name]
        self._counts[name] += 1
        name = f"{name}_{known}" if known else name
        self._rules[name + attributes] = body
        return name

    def text(self, text: str) -> str:
        """Return an expression for a text; names of special tokens match these tokens."""
        parts = self.tokenizer.split_special(text)
        return " ".join(
            f"<[{part}]>" if isinstance(part, int) else json.dumps(part, ensure_ascii=False)
            for part in parts
        )

    def json(self, schema: Any) -> str:
        """Return an expression for a value that matches a JSON schema."""
        return self.rule("json", f"%json {json.dumps(prepare_schema(schema))}")

    def arguments(self, tools: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Return expressions for the arguments of each tool; see `strict_parameters`."""
        return {name: self.json(strict_parameters(schema)) for name, schema in tools.items()}

    def upto(self, mark: str) -> str:
        """Return an expression for any text up to and including a mark."""
        parts = self.tokenizer.split_special(mark)
        if len(parts) == 1 and isinstance(parts[0], int) and self.tokenizer.is_control(parts[0]):
            any_text = self.rule("TEXT", r"/(.|\n)*/")
            return f"{any_text} <[{parts[0]}]>"
        pattern = "".join(rf"\x{{{ord(c):x}}}" for c in mark)
        return self.rule("upto", rf"/(.|\n)*{pattern}/", "[lazy]")

    def one_of(self, name: str, bodies: Iterable[str]) -> str:
        """Return an alternative of rules."""
        return self.rule(name, " | ".join(self.rule(name, body) for body in bodies))


def strict_parameters(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a tool's arguments: an object without additional properties."""
    parameters = {**(schema or _NOTHING), "type": "object"}
    if "properties" in parameters and not {"additionalProperties", "patternProperties"} & set(
        parameters
    ):
        parameters["additionalProperties"] = False
    return parameters


@dataclass(frozen=True)
class ToolCallFormat:
    """The syntax of tool calls.

    Attributes:
        name: the value of `prompt.tool_calls` in a specification.
        marks: texts that delimit calls, each of which may be a special token.
        parse: parses an answer to its end; calls of unknown tools are content.
        grammar: adds the rule of a call, or of several calls if requested and supported, to a
            grammar; returns its expression. The third argument is the template.
        new_id: generates a call's id.
        answer: adds the rule of an answer with reasoning and given content, for a format whose
            `parse` reads reasoning.
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


MAX_CALLS = 16  # calls of an answer that a grammar allows


def calls_rule(lark: LarkGrammar, calls: Iterable[str], several: bool, between: str = "") -> str:
    """Return a rule for one or several of given calls."""
    return repeated(lark.one_of("call", calls), several, between)


def repeated(call: str, several: bool, between: str = "") -> str:
    """Return an expression for a call, or for several with a separator."""
    return f"{call} ({between} {call}){{0,{MAX_CALLS - 1}}}" if several else call


def json_call_rule(
    lark: LarkGrammar, name: str, key: str, schema: str, *, named: str = "name"
) -> str:
    """Return an expression for a call as a JSON object, with given keys."""
    head = lark.text(f'{{"{named}": "{name}", "{key}": ')
    return f'{head} {schema} "}}"'

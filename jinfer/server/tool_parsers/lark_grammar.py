"""Lark grammars for llguidance: building blocks for structured outputs with tool calls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from jinfer.sampling.structured.json_schema import prepare_schema
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
        """Adds a rule under this name, or a numbered one if it is taken; returns the name."""
        known = self._counts[name]
        self._counts[name] += 1
        name = f"{name}_{known}" if known else name
        self._rules[name + attributes] = body
        return name

    def text(self, text: str) -> str:
        """Exactly this text; names of special tokens in it match these tokens."""
        parts = self.tokenizer.split_special(text)
        return " ".join(
            f"<[{part}]>" if isinstance(part, int) else json.dumps(part, ensure_ascii=False)
            for part in parts
        )

    def json(self, schema: Any) -> str:
        """A value that matches a JSON schema."""
        return self.rule("json", f"%json {json.dumps(prepare_schema(schema))}")

    def arguments(self, tools: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """The arguments of each tool, as `strict_parameters`."""
        return {name: self.json(strict_parameters(schema)) for name, schema in tools.items()}

    def upto(self, mark: str) -> str:
        """Any text up to a mark, and the mark."""
        parts = self.tokenizer.split_special(mark)
        if len(parts) == 1 and isinstance(parts[0], int) and self.tokenizer.is_control(parts[0]):
            any_text = self.rule("TEXT", r"/(.|\n)*/")
            return f"{any_text} <[{parts[0]}]>"
        pattern = "".join(rf"\x{{{ord(c):x}}}" for c in mark)
        return self.rule("upto", rf"/(.|\n)*{pattern}/", "[lazy]")

    def one_of(self, name: str, bodies: Iterable[str]) -> str:
        """An alternative of rules."""
        return self.rule(name, " | ".join(self.rule(name, body) for body in bodies))


def strict_parameters(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """The schema of a tool's arguments: an object without additional properties."""
    given = {**(schema or _NOTHING), "type": "object"}
    if "properties" in given and not {"additionalProperties", "patternProperties"} & set(given):
        given["additionalProperties"] = False
    return given

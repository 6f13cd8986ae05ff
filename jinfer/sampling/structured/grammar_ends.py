"""Checks that all rules of a Lark grammar have an end; llguidance only notices inside a dead end.

An alternative has no end if one of its terminals matches no text, or if it always needs itself.
Constructs that are not understood here count as having an end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""[^\S\n]+ | //[^\n]* | (?P<text>"(?:\\.|[^"\\\n])*"i?|<[^>\n]*>)
    | (?P<regex>/(?![/*])(?:\\.|[^/\\\n])+/[a-z]*)
    | ^(?P<head>[?!]?[A-Za-z_]\w*)(?:\.\d+)?(?:\[[^\]]*\])?\s*:(?!:)
    | (?P<nested>%(?:json|lark|regex|llguidance)\s*(?=\{)) | (?P<name>[A-Za-z_]\w*)
    | (?P<optional>[?*]|\{\s*(?:0\s*)?,[\s\d]*\}|\{\s*0\s*\}|~\s*0\b(?:\s*\.\.\s*\d+)?)
    | (?P<open>[(\[]) | (?P<close>[)\]]) | (?P<or>\|) | (?P<other>%\w+[^\n]*|.|\n)""",
    re.VERBOSE | re.MULTILINE,
)
_MAYBE_EMPTY = re.compile(r"\[\^|&|--|~|\\P")

# Alternatives, each a sequence of names of rules, regexes, other choices; None: anything else.
type Choice = list[list[str | Choice | None]]


@dataclass
class _Rules:
    """The rules of a grammar, and the text of its terminals."""

    rules: dict[str, Choice] = field(default_factory=dict)
    terminals: dict[str, str] = field(default_factory=dict)


def endless_rule(grammar: str, empty: Callable[[str], bool]) -> str | None:
    """Finds a rule with an alternative that has no end; None: all rules have ends.

    Args:
        grammar: a Lark grammar that compiles.
        empty: whether a grammar matches nothing.
    """
    read = _read(grammar)
    every = "\n".join(read.terminals.values())
    ends: dict[str, bool] = {}

    def leaf(atom: str) -> bool:
        if atom not in ends:
            named = atom in read.terminals
            text = read.terminals[atom] if named else atom
            trial = f"start: {atom}\n{every}" if named else f"start: ANY\nANY: {atom}"
            ends[atom] = not (_MAYBE_EMPTY.search(text) and empty(trial))
        return ends[atom]

    def has_end(item: str | Choice | None) -> bool:
        if item is None:
            return True
        if isinstance(item, str):
            return item in found if item in read.rules else leaf(item)
        return any(all(map(has_end, sequence)) for sequence in item)

    found: set[str] = set()
    while new := {name for name, choice in read.rules.items() if has_end(choice)} - found:
        found |= new
    bad = [
        name
        for name, choice in read.rules.items()
        if not all(all(map(has_end, sequence)) for sequence in _sequences(choice))
    ]
    # Prefer a rule without any end: other rules may only lead to it.
    return next((name for name in reversed(bad) if name not in found), bad[0] if bad else None)


def _sequences(choice: Choice) -> Iterator[list[str | Choice | None]]:
    for sequence in choice:
        yield sequence
        for item in sequence:
            if isinstance(item, list):
                yield from _sequences(item)


def _read(grammar: str) -> _Rules:
    read, position, begun = _Rules(), 0, ("", 0)
    open_choices: list[Choice] = [[[]]]
    while position < len(grammar):
        token = _TOKEN.match(grammar, position)
        assert token is not None, "anything is a token"
        kind, position = token.lastgroup, token.end()
        here = open_choices[-1]
        if kind == "head":
            _end(read, begun, grammar[begun[1] : token.start()])
            begun, open_choices = (token["head"].lstrip("?!"), token.start()), [[[]]]
            if not begun[0].isupper():
                read.rules[begun[0]] = open_choices[0]
        elif kind == "nested":
            position = json.JSONDecoder().raw_decode(grammar, position)[1]
            here[-1].append(None)
        elif kind == "or":
            here.append([])
        elif kind == "open":
            inner: Choice = [[]]
            here[-1].append(inner)
            open_choices.append(inner)
            if token[0] == "[":
                inner.append([])  # or nothing
                inner.append([])
        elif kind == "close" and len(open_choices) > 1:
            open_choices.pop()
        elif kind == "optional" and here[-1]:
            here[-1].append([[], [here[-1].pop()]])
        elif kind in ("name", "regex"):
            here[-1].append(token[0])
        elif kind == "text":
            here[-1].append(None)
    _end(read, begun, grammar[begun[1] :])
    return read


def _end(read: _Rules, begun: tuple[str, int], text: str) -> None:
    if begun[0].isupper():
        read.terminals[begun[0]] = text

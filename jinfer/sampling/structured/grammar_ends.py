"""Whether all rules of a Lark grammar have an end. llguidance finds a dead end when it is in it.

An alternative has none where a terminal of it matches no text, or where it always needs itself.
What is not understood here counts as having one.
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

# Sequences, of which one is needed: names of rules, regexes, other choices; None is anything else.
type Choice = list[list[str | Choice | None]]


@dataclass
class _Rules:
    """The rules of a grammar, and the text of its terminals."""

    rules: dict[str, Choice] = field(default_factory=dict)
    terminals: dict[str, str] = field(default_factory=dict)


def endless_rule(grammar: str, empty: Callable[[str], bool]) -> str | None:
    """A rule with an alternative that has no end; None if there is none.

    Args:
        grammar: a Lark grammar that compiles.
        empty: whether another one matches nothing.
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
    # Others may only lead to one that has no end at all.
    return next((name for name in reversed(bad) if name not in found), bad[0] if bad else None)


def _sequences(choice: Choice) -> Iterator[list[str | Choice | None]]:
    for sequence in choice:
        yield sequence
        for item in sequence:
            if isinstance(item, list):
                yield from _sequences(item)


def _read(grammar: str) -> _Rules:
    read, place, begun = _Rules(), 0, ("", 0)
    open_choices: list[Choice] = [[[]]]
    while place < len(grammar):
        token = _TOKEN.match(grammar, place)
        assert token is not None, "anything is a token"
        kind, place = token.lastgroup, token.end()
        here = open_choices[-1]
        if kind == "head":
            _end(read, begun, grammar[begun[1] : token.start()])
            begun, open_choices = (token["head"].lstrip("?!"), token.start()), [[[]]]
            if not begun[0].isupper():
                read.rules[begun[0]] = open_choices[0]
        elif kind == "nested":
            place = json.JSONDecoder().raw_decode(grammar, place)[1]
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

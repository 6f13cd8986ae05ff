"""Regular expressions by derivatives (Brzozowski, 1964): which bytes can still become a match."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Nothing:
    """Matches no text."""


@dataclass(frozen=True)
class Empty:
    """Matches the empty text."""


@dataclass(frozen=True)
class OneOf:
    """Matches one of some bytes."""

    bytes: frozenset[int]


@dataclass(frozen=True)
class Both:
    """Matches one expression after another."""

    first: Regex
    second: Regex


@dataclass(frozen=True)
class Either:
    """Matches one expression or another."""

    choices: frozenset[Regex]


@dataclass(frozen=True)
class Many:
    """Matches an expression any number of times."""

    inner: Regex


type Regex = Nothing | Empty | OneOf | Both | Either | Many


def both(first: Regex, second: Regex) -> Regex:
    if isinstance(first, Nothing) or isinstance(second, Nothing):
        return Nothing()
    if isinstance(first, Empty):
        return second
    return first if isinstance(second, Empty) else Both(first, second)


def either(*choices: Regex) -> Regex:
    flat: set[Regex] = set()
    for choice in choices:
        flat |= choice.choices if isinstance(choice, Either) else {choice}
    flat.discard(Nothing())
    if len(flat) < 2:
        return next(iter(flat), Nothing())
    return Either(frozenset(flat))


def literal(text: str) -> Regex:
    found: Regex = Empty()
    for byte in reversed(text.encode()):
        found = both(OneOf(frozenset({byte})), found)
    return found


@cache
def complete(regex: Regex) -> bool:
    """Whether the empty text matches."""
    match regex:
        case Empty() | Many():
            return True
        case Both(first, second):
            return complete(first) and complete(second)
        case Either(choices):
            return any(map(complete, choices))
    return False


@cache
def after(regex: Regex, byte: int) -> Regex:
    """What must match once this byte has been read; Nothing if it cannot be."""
    match regex:
        case OneOf(members):
            return Empty() if byte in members else Nothing()
        case Both(first, second):
            rest = both(after(first, byte), second)
            return either(rest, after(second, byte)) if complete(first) else rest
        case Either(choices):
            return either(*(after(choice, byte) for choice in choices))
        case Many(inner):
            return both(after(inner, byte), regex)
    return Nothing()


def after_all(regex: Regex, data: bytes) -> Regex:
    for byte in data:
        regex = after(regex, byte)
    return regex


def random_regex(rng: random.Random, depth: int) -> tuple[str, Regex]:
    """The same expression as a text and as a tree; none of them is Nothing."""
    kind = rng.randrange(6) if depth else rng.randrange(2)
    if kind == 0:
        text = "".join(rng.choices(["a", "b", "c", "é", "日"], k=rng.randint(1, 3)))
        return text, literal(text)
    if kind == 1:
        members = sorted(rng.sample("abcd", rng.randint(1, 3)))
        return f"[{''.join(members)}]", OneOf(frozenset(map(ord, members)))
    one, tree = random_regex(rng, depth - 1)
    other, tree2 = random_regex(rng, depth - 1)
    if kind == 2:
        return f"(?:{one}|{other})", either(tree, tree2)
    if kind == 3:
        return f"(?:{one})*", Many(tree)
    if kind == 4:
        return f"(?:{one})?(?:{other})", both(either(tree, Empty()), tree2)
    return f"(?:{one}){{1,2}}(?:{other})", both(both(tree, either(tree, Empty())), tree2)

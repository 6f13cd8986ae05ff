"""Name folding: names that differ only in numbers on one line: `layers.{0..29}.attn.q`."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable

from jinfer.modelspec.view.model_svg import numbers_text

_NUMBER = re.compile(r"(?:(?<=[.\[])|^)\d+(?=[.\]]|$)")


def fold[T](
    items: Iterable[T], name: Callable[[T], str], key: Callable[[T], Hashable]
) -> list[tuple[str, list[T]]]:
    """Groups items whose names differ only in numbers and whose keys are equal, in order.

    Returns:
        (folded name, items) of each group.
    """
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault((pattern_of(name(item)), key(item)), []).append(item)
    return [(_filled([name(item) for item in group]), group) for group in groups.values()]


def fold_names(names: Iterable[str]) -> list[str]:
    """Names, folded."""
    return [name for name, _ in fold(names, lambda name: name, lambda name: None)]


def pattern_of(name: str) -> tuple[str, ...]:
    """A name without the numbers that are whole parts of it."""
    return tuple(_NUMBER.split(name))


def numbered(name: str, letters: str) -> str:
    """A name with its numbers replaced by {i}, {e}, ... as a `[tensors]` table has them."""
    left = list(letters)
    return _NUMBER.sub(lambda found: f"{{{left.pop(0)}}}" if left else found[0], name)


def _filled(names: list[str]) -> str:
    """Names of one pattern as one, with the ranges of their numbers, slot by slot."""
    found = [list(map(int, _NUMBER.findall(name))) for name in names]
    slots = [sorted(set(numbers)) for numbers in zip(*found, strict=True)]
    texts = iter(str(s[0]) if len(s) == 1 else f"{{{numbers_text(s)}}}" for s in slots)
    return _NUMBER.sub(lambda number: next(texts), names[0])

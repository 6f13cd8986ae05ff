"""TOML tables: checks of types and keys, merging, dotted keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jinfer.modelspec.spec_errors import SpecError, nearest_hint, show_value

Table = dict[str, Any]
_USES = ("embeddings", "matrices", "heads", "plain")
MAX_DEPTH = 16  # nesting of tables and lists; real specifications have about six


def as_table(written: Any, path: object, key: str) -> Mapping[str, Any]:
    """`written` if it is a table. Raises `SpecError`."""
    if not isinstance(written, Mapping):
        raise SpecError(path, key, f"{show_value(written)} is not a table")
    return written


def check_keys(table: Any, allowed: Iterable[str], path: object, key: str) -> Mapping[str, Any]:
    """`table` if it is one and has no unknown keys. Raises `SpecError`."""
    allowed = tuple(allowed)
    for name in as_table(table, path, key):
        if name not in allowed:
            where = f"{key}.{name}" if key else name
            raise SpecError(path, where, f"unknown key; {nearest_hint(name, allowed)}")
    return table


def check_text(written: Any, path: object, key: str) -> str:
    """`written` if it is a string. Raises `SpecError`."""
    if not isinstance(written, str):
        raise SpecError(path, key, f"{show_value(written)} is not a text")
    return written


def check_count(written: Any, path: object, key: str) -> int:
    """The number in a text such as "6.7B" or "135M". Raises `SpecError`."""
    found = re.fullmatch(r"([0-9]{1,4}(?:\.[0-9]{1,3})?)([KMBT])", check_text(written, path, key))
    if not found:
        raise SpecError(
            path, key, f'{show_value(written)} is not a count, such as "6.7B" or "135M"'
        )
    return round(float(found[1]) * 10 ** (3 * " KMBT".index(found[2])))


def check_parameters(written: Any, path: object) -> dict[str, int]:
    """The number of parameters of a model by use; a single number counts as matrices.

    Raises:
        SpecError: it is neither such a table nor a text.
    """
    if not isinstance(written, Mapping):
        return {"matrices": check_count(written, path, "parameters")}
    for use, count in check_keys(written, _USES, path, "parameters").items():
        if type(count) is not int or not 0 <= count < 10**15:
            raise SpecError(
                path, f"parameters.{use}", f"{show_value(count)} is not a number of weights"
            )
    return dict(written)


def check_texts(written: Any, path: object, key: str) -> tuple[str, ...]:
    """The strings of `written`, one or a list of them. Raises `SpecError`."""
    texts = [written] if isinstance(written, str) else written
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise SpecError(path, key, f"{show_value(written)} is not a text or a list of texts")
    return tuple(texts)


def check_plain(table: Any, path: object) -> None:
    """Raises `SpecError` unless keys are strings and the nesting is shallow enough to recurse."""
    level = [as_table(table, path, "")]
    for _ in range(MAX_DEPTH):
        for inner in level:
            for key in inner if isinstance(inner, Mapping) else ():
                if not isinstance(key, str):
                    raise SpecError(path, show_value(key), "is not a text, so it cannot be a key")
        level = [child for inner in level for child in _children(inner)]
        if not level:
            return
    raise SpecError(path, "", f"has tables and lists in each other more than {MAX_DEPTH} deep")


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    """Merges `over` into `base` recursively; a table of another `kind` replaces the whole."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if (
            isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and is_partial_override(old, value)
        ):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def is_partial_override(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a table changes parts of the table that it overrides, rather than replacing it."""
    return "kind" not in new or new["kind"] == old.get("kind")


def nested(key: str, value: Any) -> Table:
    """`{"a": {"b": value}}` for the dotted key `a.b`. Raises `SpecError`."""
    parts = key.split(".")
    if not all(part.strip() == part != "" for part in parts) or len(parts) > MAX_DEPTH:
        raise SpecError("--set", key, "is not a key, such as engine.context")
    for part in reversed(parts):
        value = {part: value}
    return value


def strings_in(written: Any) -> Iterator[str]:
    """All strings in a table or list, without keys."""
    if isinstance(written, str):
        yield written
    elif isinstance(written, Mapping | list):
        for child in written.values() if isinstance(written, Mapping) else written:
            yield from strings_in(child)


def _children(container: Any) -> list[Any]:
    inner = container.values() if isinstance(container, Mapping) else container
    return [child for child in inner if isinstance(child, Mapping | list | tuple)]

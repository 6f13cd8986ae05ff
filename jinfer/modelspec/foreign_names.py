"""Foreign names: the names of other engines, and what each is here (`foreign_names.toml`)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "texts": list[str],
          "object": dict[str, Any]}  # fmt: skip


@dataclass(frozen=True)
class ForeignName:
    """Names with one meaning: keywords of Python; with hyphens in front, flags alone.

    Attributes:
        key: the key of a specification with the same meaning.
        parameter: the sampling parameter with the same meaning.
        option: the field of a flag with the same meaning.
        python: what to do instead, in Python.
        flag: what to do instead, on a command line.
        serve: the same for `jinfer serve`, where it differs.
    """

    names: tuple[str, ...]
    key: str = ""
    parameter: str = ""
    option: str = ""
    python: str = ""
    flag: str = ""
    serve: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """The names as flags."""
        return tuple(
            name if name.startswith("-") else f"--{name.replace('_', '-')}" for name in self.names
        )


@dataclass(frozen=True)
class ForeignField:
    """A field of HTTP requests that has no effect here.

    Attributes:
        reason: why there is no effect.
        type: the type of the values that are ignored and reported; None: they are refused.
        neutral: values that request what happens anyway.
    """

    reason: str
    type: Any = None
    neutral: tuple[Any, ...] = ()


@cache
def _engines() -> tuple[Mapping[str, Any], ...]:
    file = Path(__file__).with_suffix(".toml")
    return tuple(tomllib.loads(file.read_text(encoding="utf-8")).values())


@cache
def foreign_names() -> tuple[ForeignName, ...]:
    """All names of keywords, parameters and flags."""
    rows = (row for engine in _engines() for row in engine["names"].items())
    return tuple(ForeignName(tuple(names.split()), **meaning) for names, meaning in rows)


def foreign_fields() -> dict[str, ForeignField]:
    """All fields of HTTP requests that have no effect here, by name."""
    found: dict[str, ForeignField] = {}
    for engine in _engines():
        for names, row in engine.get("fields", {}).items():
            neutral, type_ = tuple(row.get("neutral", ())), _TYPES.get(row.get("type"))
            field = ForeignField(row["reason"], type_, neutral)
            found |= dict.fromkeys(names.split(), field)
    return found


def foreign_commands() -> dict[str, str]:
    """Commands of other programs -> jinfer's."""
    return {k: v for engine in _engines() for k, v in engine.get("commands", {}).items()}


@cache
def parameter_aliases() -> Mapping[str, str]:
    """Names of sampling parameters in Python and in JSON -> jinfer's."""
    rows = ((name, row.parameter) for row in foreign_names() for name in row.names)
    return {name: own for name, own in rows if own and not name.startswith("-")}


def keyword(name: str) -> ForeignName | None:
    """What a keyword in Python is here; None if it is unknown, or a sampling parameter."""
    known = (row for row in foreign_names() if name in row.names and (row.key or row.python))
    return next(known, None)


def flag_aliases(name: str, key: str = "") -> Iterator[str]:
    """Other engines' flags for a sampling parameter or an option, or for a specification's key."""
    for row in foreign_names():
        if name in (row.parameter, row.option) or (key and row.key == key):
            yield from row.flags


def flag_hint(flag: str, serve: bool = False) -> str:
    """What to do instead of a flag that does not exist, or ""."""
    rows = [row for row in foreign_names() if flag in row.flags]
    texts = [row.serve for row in rows] if serve else []
    texts += [row.flag for row in rows]
    texts += [f"--set {row.key}=... is that key" if row.key else row.python for row in rows]
    return next(filter(None, texts), "")

"""TOML writer: Python's standard library only reads TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """A table as TOML: its values first, then its subtables, each under its name.

    Args:
        path: the names of the enclosing tables.
    """
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value)}\n" for key, value in values.items()]
    if path and (lines or not tables):
        lines.insert(0, f"\n[{'.'.join(map(_key, path))}]\n")
    return "".join([*lines, *(toml_text(table, (*path, key)) for key, table in tables.items())])


def inline_text(value: Any) -> str:
    """A value as TOML, in one line but for texts of several."""
    return _value(value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() if "\n" in value:
            lines = (_text(line)[1:-1] for line in value.split("\n"))
            return '"""\n' + "\n".join(lines) + '"""'
        case str():
            return _text(value)
        case Mapping():
            return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _text(text: str) -> str:
    # JSON's strings are TOML's, but for the one control character that JSON allows.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

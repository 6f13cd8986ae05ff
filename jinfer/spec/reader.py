"""Reads tables of a specification into frozen dataclasses, checking every key and type."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jinfer.spec.blocks import ACTIVATION_ALIASES
from jinfer.spec.errors import SpecError, nearest
from jinfer.spec.values import Values

_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def read(cls: Any, written: Any, values: Values, key: str) -> Any:
    """Reads what stands at `key` as type `cls`.

    Args:
        cls: int, float, bool, str, a Literal, a tuple, a dataclass, or a union of these.
        written: what the file has there.

    Raises:
        SpecError: names the key, what is wrong, and what is allowed.
    """
    options = get_args(cls) if get_origin(cls) in (Union, types.UnionType) else (cls,)
    value = values.value(written, key, words=any(_takes_words(option) for option in options))
    if value is None and type(None) in options:
        return None
    tables = [option for option in options if dataclasses.is_dataclass(option)]
    if tables and isinstance(value, Mapping):
        return _read_table(_pick(tables, value, values, key), value, values, key)
    for option in options:
        if (read_value := _plain(option, value)) is not None:
            return read_value
    raise SpecError(values.path, key, f"{value!r} is not {_describe(options, value)}")


def _takes_words(option: Any) -> bool:
    return option is str or get_origin(option) is Literal


def _plain(option: Any, value: Any) -> Any:
    """`value` as the type `option`, or None if it is not one."""
    if get_origin(option) is Literal:
        value = ACTIVATION_ALIASES.get(value, value) if isinstance(value, str) else value
        return value if value in get_args(option) else None
    if get_origin(option) is tuple and isinstance(value, list):
        parts = [_plain(get_args(option)[0], part) for part in value]
        return None if None in parts else tuple(parts)
    if option is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if option is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value if type(value) is option else None


def _describe(options: tuple[Any, ...], value: Any) -> str:
    words = []
    for option in options:
        if get_origin(option) is Literal:
            words.append(f"one of these ({nearest(str(value), get_args(option))})")
        elif dataclasses.is_dataclass(option):
            words.append("a table { ... }")
        elif get_origin(option) is tuple:
            words.append("a list of " + _PLAIN[get_args(option)[0]].split(" ", 1)[1] + "s")
        elif option is type(None):
            words.append("none")
        else:
            words.append(_PLAIN[option])
    return " or ".join(words)


def _pick(classes: list[Any], table: Mapping[str, Any], values: Values, key: str) -> Any:
    """The dataclass that a table's `kind` names; the only one if there is no choice."""
    if len(classes) == 1 and "kind" not in _fields(classes[0]):
        return classes[0]
    kinds = {get_args(_fields(cls)["kind"][1])[0]: cls for cls in classes}
    if "kind" not in table:
        raise SpecError(values.path, key, f"has no 'kind'; {nearest('', kinds)}")
    kind = values.value(table["kind"], f"{key}.kind", words=True)
    if kind not in kinds:
        raise SpecError(
            values.path, f"{key}.kind", f"unknown kind {kind!r}; {nearest(str(kind), kinds)}"
        )
    return kinds[kind]


@cache
def _fields(cls: Any) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(cls)
    return {field.name: (field, hints[field.name]) for field in dataclasses.fields(cls)}


def _read_table(cls: Any, table: Mapping[str, Any], values: Values, key: str) -> Any:
    known = _fields(cls)
    aliases, ignored = getattr(cls, "ALIASES", {}), getattr(cls, "IGNORED", ())
    given = {aliases.get(name, name): value for name, value in table.items() if name not in ignored}
    for name in given:
        if name not in known:
            raise SpecError(values.path, f"{key}.{name}", f"unknown key; {nearest(name, known)}")
    arguments = {}
    for name, (field, hint) in known.items():
        if name in given:
            arguments[name] = read(hint, given[name], values, f"{key}.{name}")
        elif "dim" in field.metadata:
            arguments[name] = read(hint, values.dim(field.metadata["dim"], key), values, key)
        elif field.default is dataclasses.MISSING:
            raise SpecError(values.path, f"{key}.{name}", "is missing")
    return cls(**arguments)

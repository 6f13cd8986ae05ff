"""Table reader: specification tables to frozen dataclasses, with checked keys and types."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jinfer.modelspec.bounded_types import WrongValue, fields, mismatch, read_as, union
from jinfer.modelspec.feed_forward_blocks import ACTIVATION_ALIASES
from jinfer.modelspec.spec_errors import SpecError, nearest_hint, show_value
from jinfer.modelspec.spec_values import SpecValues

__all__ = ["fields", "read_value", "union"]


def read_value(cls: Any, written: Any, values: SpecValues, key: str) -> Any:
    """Reads the value at `key` as type `cls`.

    Args:
        cls: a type as `read_as` takes it, a dataclass, or a union.
        written: the value in the file.

    Raises:
        SpecError: names the key, what is wrong, and what is allowed.
    """
    words = any(option is str or get_origin(option) is Literal for option in union(cls))
    value = values.value(written, key, words=words, names=values.names)
    return _typed(cls, value, written, values, key)


def _typed(cls: Any, value: Any, written: Any, values: SpecValues, key: str) -> Any:
    """`value`, the evaluated `written`, as type `cls`."""
    options = union(cls)
    if value is None and type(None) in options:
        return None
    tables = [option for option in options if dataclasses.is_dataclass(option)]
    if tables and isinstance(value, Mapping):
        if "when" in value and type(None) in options:
            if not read_value(bool, value["when"], values, f"{key}.when"):
                return None
            value = {name: field for name, field in value.items() if name != "when"}
        return _read_table(_pick(tables, value, values, key), value, values, key)
    plain = value
    if any(get_origin(option) is Literal for option in options):
        plain = "none" if value is None else value
        plain = ACTIVATION_ALIASES.get(plain, plain) if isinstance(plain, str) else plain
    try:
        return read_as(cls, plain)
    except WrongValue:
        wrong = mismatch(cls, value)
    origin = f" ({written})" if isinstance(written, str) and written != value else ""
    reason = f"{show_value(value)}{origin} is not {wrong.expected}{wrong.hint}"
    raise SpecError(values.path, key, reason)


def _pick(classes: list[Any], table: Mapping[str, Any], values: SpecValues, key: str) -> Any:
    """The dataclass that a table's `kind` names; the only one if there is no choice."""
    if len(classes) == 1 and not any(f.name == "kind" for f in dataclasses.fields(classes[0])):
        return classes[0]
    kinds = {word: cls for cls in classes for word in _kind_words(cls)}
    if "kind" not in table:
        raise SpecError(values.path, f"{key}.kind", f"is missing; {nearest_hint('', kinds)}")
    kind = values.value(table["kind"], f"{key}.kind", words=True)
    if not isinstance(kind, str) or kind not in kinds:
        raise SpecError(
            values.path,
            f"{key}.kind",
            f"unknown kind {show_value(kind)}; {nearest_hint(kind, kinds)}",
        )
    return kinds[kind]


@cache
def _kind_words(cls: Any) -> tuple[str, ...]:
    """The kinds that a dataclass is read for.

    Of its types only this one is resolved: there are many dataclasses, and a model has few.
    """
    home = next(base for base in cls.__mro__ if "kind" in vars(base).get("__annotations__", ()))
    only = types.SimpleNamespace(__annotations__={"kind": home.__annotations__["kind"]})
    return get_args(get_type_hints(only, vars(sys.modules[home.__module__]))["kind"])


def _read_table(cls: Any, table: Mapping[str, Any], values: SpecValues, key: str) -> Any:
    known = fields(cls)
    aliases = getattr(cls, "ALIASES", {})
    ignored = cls.ignored(table) if hasattr(cls, "ignored") else ()
    names = [name for name in table if name not in ignored]  # ignored keys are read elsewhere
    names.sort(key=lambda name: name not in aliases)  # the name precedes its alias
    given = {aliases.get(name, name): table[name] for name in names}
    for name in given:
        if name not in known:
            raise SpecError(
                values.path, f"{key}.{name}", f"unknown key; {nearest_hint(name, known)}"
            )
    arguments = {}
    for name, (field, hint) in known.items():
        if name in given:
            arguments[name] = read_value(hint, given[name], values, f"{key}.{name}")
        elif "dim" in field.metadata:
            dim = field.metadata["dim"]
            value = values.dim(dim, f"{key}.{name}")
            arguments[name] = _typed(hint, value, values.dims[dim], values, f"dims.{dim}")
        elif "served" in field.metadata:
            arguments[name] = values.served_context(f"{key}.{name}")
        elif field.default is dataclasses.MISSING:
            raise SpecError(values.path, f"{key}.{name}", "is missing")
    result = cls(**arguments)
    if hasattr(cls, "check") and (wrong := result.check()):
        raise SpecError(values.path, f"{key}.{wrong[0]}", wrong[1])
    if hasattr(cls, "lacks") and (wrong := result.lacks(given)):
        raise SpecError(values.path, f"{key}.{wrong[0]}", wrong[1])
    return result

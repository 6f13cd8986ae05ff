"""Omitted modules: those that a `when` leaves out, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_values import Values
from jinfer.modelspec.table_reader import read
from jinfer.modelspec.tensor_names import LeftOut, TensorMap


def left_out(whole: Mapping[str, Any], tensors: TensorMap, values: Values) -> tuple[LeftOut, ...]:
    """The modules whose condition is false and that `[tensors]` has names for.

    Args:
        merged: a specification's merged tables.
    """
    found = []
    for stack in ("", "encoder.", "decoder."):
        table = whole.get(stack.rstrip("."), {}) if stack else whole
        for name, module in table.get("modules", {}).items():
            when = module.get("when") if isinstance(module, Mapping) else None
            key = f"{stack}modules.{name}.when"
            if isinstance(when, str) and _is_false(when, key, values):
                owned = (f"{stack}{name}", f"{stack}{{i}}.{name}")
                names = tuple(name for each in owned for name in _names(each, tensors))
                found += [LeftOut(key, when, names)] if names else []
    return tuple(found)


def _is_false(when: str, key: str, values: Values) -> bool:
    try:
        return not read(bool, when, values, key)
    except SpecError:  # it depends on the layer
        return False


def _names(module: str, tensors: TensorMap) -> Iterator[str]:
    for pattern, entry in tensors.entries:
        if pattern == module or pattern.startswith(f"{module}."):
            yield from entry.names

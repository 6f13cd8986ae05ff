"""Omitted modules: those that a `when` leaves out, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_values import SpecValues
from jinfer.modelspec.table_reader import read_value
from jinfer.modelspec.tensor_names import OmittedModule, TensorMap


def omitted_modules(
    merged: Mapping[str, Any], tensors: TensorMap, values: SpecValues
) -> tuple[OmittedModule, ...]:
    """The modules whose condition is false and that `[tensors]` has names for.

    Args:
        merged: a specification's merged tables.
    """
    found = []
    for stack in ("", "encoder.", "decoder."):
        table = merged.get(stack.rstrip("."), {}) if stack else merged
        for name, module in table.get("modules", {}).items():
            when = module.get("when") if isinstance(module, Mapping) else None
            key = f"{stack}modules.{name}.when"
            if isinstance(when, str) and _is_false(when, key, values):
                owned = (f"{stack}{name}", f"{stack}{{i}}.{name}")
                names = tuple(name for each in owned for name in _names(each, tensors))
                found += [OmittedModule(key, when, names)] if names else []
    return tuple(found)


def _is_false(when: str, key: str, values: SpecValues) -> bool:
    try:
        return not read_value(bool, when, values, key)
    except SpecError:  # it depends on the layer
        return False


def _names(module: str, tensors: TensorMap) -> Iterator[str]:
    for pattern, entry in tensors.entries:
        if pattern == module or pattern.startswith(f"{module}."):
            yield from entry.names

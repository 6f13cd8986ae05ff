"""Override conflicts: keys that are lost when an override replaces a module by another kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, is_dataclass, replace
from typing import Any

from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.spec_errors import SpecError, show_value
from jinfer.modelspec.spec_values import SpecValues
from jinfer.modelspec.table_reader import fields, read_value
from jinfer.modelspec.toml_tables import is_partial_override

_BUILT = ("modules", "encoder", "decoder")


@dataclass(frozen=True)
class LostKey:
    """A key of a replaced table that the new table does not have.

    Attributes:
        path: ("decoder", "modules", "attn", "position", "pairs").
        value: its value as written.
        kind: the new kind.
    """

    path: tuple[str, ...]
    value: Any
    kind: Any


def lost_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[LostKey]:
    """The keys of modules that are lost when `new` is merged over `old`."""
    for name in _BUILT:
        if isinstance(old.get(name), Mapping) and isinstance(new.get(name), Mapping):
            yield from _lost((name,), old[name], new[name], None)


def _lost(
    path: tuple[str, ...], old: Mapping[str, Any], new: Mapping[str, Any], kind: Any
) -> Iterator[LostKey]:
    """Those below `path`; `kind` is that of the replacing table, None if nothing replaced it."""
    for key, value in old.items():
        over = new.get(key)
        if isinstance(value, Mapping) and isinstance(over, Mapping):
            changed = kind if is_partial_override(value, over) else over["kind"]
            yield from _lost((*path, key), value, over, changed)
        elif key not in new and kind is not None and key not in ("kind", "when"):
            yield LostKey((*path, key), value, kind)


def check_lost_keys(
    lost_keys: Iterable[LostKey], merged: Mapping[str, Any], spec: ModelSpec, values: SpecValues
) -> None:
    """Raises `SpecError` for a lost key that the new module also has, with another value.

    Args:
        merged: the merged tables.
        spec: the specification resolved from them.
    """
    for lost in lost_keys:
        if _is_written(lost.path, merged):
            continue
        for block in _blocks(lost.path, spec):
            _check(lost, block, values)


def _is_written(path: tuple[str, ...], table: Any) -> bool:
    for part in path:
        if not isinstance(table, Mapping) or part not in table:
            return False
        table = table[part]
    return True


def _blocks(path: tuple[str, ...], spec: ModelSpec) -> Iterator[Any]:
    """The blocks built from the table that contained a key."""
    stack, modules = (path[0], path[1:]) if path[0] != "modules" else ("", path)
    if modules[0] != "modules" or len(modules) < 3:  # a variant: its base table is beside it
        return
    _, name, *inner = modules[:-1]
    groups = [spec.shared] if not stack else []
    for each in spec.stacks:
        if each.name == stack:
            groups += [each.modules, *(layer.modules for layer in each.layers)]
    for block in {id(b): b for group in groups for n, b in group if n == name}.values():
        part: Any = block
        for step in inner:
            part = getattr(part, step, None)
        if is_dataclass(part):
            yield part


def _check(lost: LostKey, block: Any, values: SpecValues) -> None:
    name, cls = lost.path[-1], block.__class__
    if name not in fields(cls):
        return
    field, hint = fields(cls)[name]
    key, now = ".".join(lost.path), getattr(block, name)
    if "dim" in field.metadata:
        usual = values.dim(field.metadata["dim"], key)
    else:
        usual = None if field.default is MISSING else field.default
    if now != usual:  # a variant sets it
        return
    try:
        before = read_value(hint, lost.value, values, key)
        same = replace(block, **{name: before}) == block
    except SpecError:  # the value is invalid for the new kind
        return
    if not same:
        raise SpecError(
            values.path,
            key,
            f"was {show_value(before)}, but kind = {show_value(lost.kind)} replaces the module and "
            f"leaves it behind, so it would be {show_value(now)}; say which it is",
        )

"""Looking up keys of a config.json, in every form that files have, and which were read.

Tables are handed out as mappings that note which of their keys are read: that a table was looked
at says nothing of what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinfer.modelspec.spec_values import Missing

# Transformers 5 writes these into the table `rope_parameters`, older files at the top. In a table
# they count before those at the top.
_ROTARY = ("rope_theta", "partial_rotary_factor")
_ROTARY_TABLES = ("rope_scaling", "rope_parameters")


class WatchedTable(Mapping[str, Any]):
    """A table of a config.json; each key that is read goes to `asked`, with dots before it.

    Keys with null or an empty table are left out: they count as absent.
    """

    def __init__(self, table: Mapping[str, Any], key: str, asked: set[str]) -> None:
        self._table = {name: value for name, value in table.items() if not _is_absent(value)}
        self._key, self._asked = key, asked

    def __getitem__(self, name: str) -> Any:
        value = self._table[name]
        key = f"{self._key}.{name}" if self._key else name
        if isinstance(value, Mapping):
            return WatchedTable(value, key, self._asked)
        self._asked.add(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, name: object) -> bool:
        return name in self._table

    def __repr__(self) -> str:
        return repr(self._table)


def lookup_in(table: Mapping[str, Any], asked: set[str] | None = None) -> Callable[[str], Any]:
    """A lookup of dotted keys in nested tables, such as a config.json; it raises `Missing`.

    `$rope_scaling` is the table `rope_parameters` where there is no `rope_scaling`, and
    `$rope_theta` and `$partial_rotary_factor` are found in either, as transformers 5 reads them. A
    `rope_parameters` with a table for each kind of layer is none of these.

    Args:
        asked: where the keys that are read go.
    """
    top = WatchedTable(table, "", set() if asked is None else asked)
    rotary = next((name for name in _ROTARY_TABLES if name in top and _is_flat(table[name])), None)

    def lookup(key: str) -> Any:
        first, _, rest = key.partition(".")
        if rotary and key in _ROTARY and key in top[rotary]:
            return top[rotary][key]
        if rotary and first == "rope_scaling":
            return _inside(top, f"{rotary}.{rest}" if rest else rotary, key)
        return _inside(top, key, key)

    return lookup


def _inside(table: Mapping[str, Any], key: str, asked_for: str) -> Any:
    found: Any = table
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise Missing(asked_for)
        found = found[part]
    return found


def _is_flat(value: Any) -> bool:
    return isinstance(value, Mapping) and not all(isinstance(v, Mapping) for v in value.values())


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and not value)

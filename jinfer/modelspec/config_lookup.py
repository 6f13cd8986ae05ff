"""config.json lookup: keys in every form that files have, with a record of which were read.

Nested tables are wrapped in mappings that record which of their keys are read, since reading the
table does not mean that its keys were used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from jinfer.modelspec.spec_values import MissingKey, NullKey

# Transformers 5 writes these into the table `rope_parameters`, older files at the top level. Keys
# in a table take precedence.
_ROTARY = ("rope_theta", "partial_rotary_factor")
_ROTARY_TABLES = ("rope_scaling", "rope_parameters")


class RecordingTable(Mapping[str, Any]):
    """A table of a config.json that records each key read in `keys_read`, as a dotted path.

    Keys with null or an empty table count as absent.

    Attributes:
        nulls: the keys with null.
    """

    def __init__(self, table: Mapping[str, Any], key: str, keys_read: set[str]) -> None:
        self._table = {name: value for name, value in table.items() if not _is_absent(value)}
        self.nulls = {name for name, value in table.items() if value is None}
        self._key, self._keys_read = key, keys_read

    def __getitem__(self, name: str) -> Any:
        value = self._table[name]
        key = f"{self._key}.{name}" if self._key else name
        if isinstance(value, Mapping):
            return RecordingTable(value, key, self._keys_read)
        self._keys_read.add(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, name: object) -> bool:
        return name in self._table

    def __repr__(self) -> str:
        return repr(self._table)


def lookup_in(table: Mapping[str, Any], keys_read: set[str] | None = None) -> Callable[[str], Any]:
    """Makes a lookup of dotted keys in nested tables (config.json) that raises `MissingKey`.

    A number in a key is an index of a list.

    `$rope_scaling` falls back to the table `rope_parameters`, and `$rope_theta` and
    `$partial_rotary_factor` are found in either, as in transformers 5. A `rope_parameters` with a
    table for each layer type is not flat and is not used for these.

    Args:
        keys_read: set to which the keys read are added.
    """
    top = RecordingTable(table, "", set() if keys_read is None else keys_read)
    rotary = next((name for name in _ROTARY_TABLES if name in top and _is_flat(table[name])), None)

    def lookup(key: str) -> Any:
        first, _, rest = key.partition(".")
        if rotary and key in _ROTARY and key in top[rotary]:
            return top[rotary][key]
        if rotary and first == "rope_scaling":
            return _inside(top, f"{rotary}.{rest}" if rest else rotary, key)
        return _inside(top, key, key)

    return lookup


def item_of_list(lookup: Callable[[str], Any], key: str) -> Any:
    """Looks up "name.index", an item of a list. Raises `MissingKey`."""
    name, _, index = key.rpartition(".")
    if name and index.isdecimal():
        with suppress(MissingKey):
            values = lookup(name)
            if isinstance(values, list) and int(index) < len(values):
                return values[int(index)]
    raise MissingKey(key)


def _inside(table: Mapping[str, Any], key: str, asked_for: str) -> Any:
    result: Any = table
    for part in key.split("."):
        if isinstance(result, list) and part.isdecimal() and int(part) < len(result):
            result = result[int(part)]
            continue
        if not isinstance(result, Mapping) or part not in result:
            is_null = isinstance(result, RecordingTable) and part in result.nulls
            raise (NullKey if is_null else MissingKey)(asked_for)
        result = result[part]
    return result


def _is_flat(value: Any) -> bool:
    return isinstance(value, Mapping) and not all(isinstance(v, Mapping) for v in value.values())


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and not value)

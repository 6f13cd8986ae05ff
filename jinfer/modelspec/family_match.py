"""Family matching (`[match]`): which checkpoints a family is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from jinfer.modelspec.spec_errors import SpecError, show_value
from jinfer.modelspec.spec_values import MissingKey, SpecValues
from jinfer.modelspec.toml_tables import check_keys, check_text, check_texts

_KEYS = ("architectures", "gguf", "llama2c", "when")


def check_match(table: Any, path: object) -> None:
    """Raises `SpecError` unless `table` is a valid `[match]` table."""
    check_keys(table, _KEYS, path, "match")
    for key in ("architectures", "gguf"):
        check_texts(table.get(key, []), path, f"match.{key}")
    if not isinstance(table.get("llama2c", False), bool):
        raise SpecError(
            path, "match.llama2c", f"{show_value(table['llama2c'])} is not true or false"
        )
    check_text(table.get("when", ""), path, "match.when")


def matches(
    table: Mapping[str, Any],
    path: object,
    *,
    format: str,
    architectures: Set[str],
    lookup: Callable[[str], Any],
    has: Callable[[str], bool],
    rows: Callable[[str], int],
) -> bool:
    """Whether a family matches a checkpoint.

    Args:
        table: the family's `[match]`.
        architectures: the checkpoint's architecture names.
        lookup, has, rows: as in `SpecValues`.

    Raises:
        SpecError: an invalid table.
    """
    check_match(table, path)
    if format == "llama2c":
        return bool(table.get("llama2c", False))
    wanted = check_texts(table.get("gguf" if format == "gguf" else "architectures", []), path, "")
    if architectures.isdisjoint(wanted):
        return False
    if "when" not in table:
        return True

    def or_false(find: Callable[[str], Any]) -> Callable[[str], Any]:
        """In a condition, a missing key or tensor counts as false."""

        def found(name: str) -> Any:
            try:
                return find(name)
            except MissingKey:
                return False

        return found

    values = SpecValues(path, {}, or_false(lookup), has, row_count=or_false(rows))
    return bool(values.value(table["when"], "match.when"))

"""LoRA adapters, specification: the table `[adapters]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinfer.modelspec.spec_errors import SpecError, show_value
from jinfer.modelspec.toml_tables import as_table, check_keys


@dataclass(frozen=True)
class AdapterSpec:
    """A LoRA adapter: an entry of `[adapters]`; a string is its `source`.

    Attributes:
        name: its key, by which requests name it.
        source: a folder of PEFT's or a GGUF file, as `weights` is named.
        merge: whether it is merged into the weights when they are loaded, for all requests.
    """

    name: str
    source: str
    merge: bool = False


def read_adapters(written: Any, path: str) -> tuple[AdapterSpec, ...]:
    """Reads the table. Raises `SpecError`."""
    found = []
    for name, entry in as_table(written, path, "adapters").items():
        key = f"adapters.{name}"
        given = {"source": entry} if isinstance(entry, str) else entry
        if not isinstance(given, Mapping):
            reason = f"{show_value(entry)} is not a source, or a table {{ source, merge }}"
            raise SpecError(path, key, reason)
        check_keys(given, ("source", "merge"), path, key)
        source, merge = given.get("source"), given.get("merge", False)
        if not isinstance(source, str) or not source:
            reason = f"{show_value(source)} is not the path of an adapter"
            raise SpecError(path, f"{key}.source", reason)
        if not isinstance(merge, bool):
            raise SpecError(path, f"{key}.merge", f"{show_value(merge)} is not true or false")
        found.append(AdapterSpec(name, source, merge))
    return tuple(found)

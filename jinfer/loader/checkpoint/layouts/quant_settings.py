"""Quantization settings of a checkpoint (`quantization_config`), read key by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinfer.loader.checkpoint.checkpoint_reader import CheckpointError

INSTEAD = "use the original weights, or the model as GGUF"


@dataclass(frozen=True)
class QuantSettings:
    """A table that says how weights are quantized.

    Attributes:
        table: as it stands in the file.
        path: the file, for errors.
        name: the table's key in it, with dots; "": it is the file.
    """

    table: Mapping[str, Any]
    path: Path
    name: str = "quantization_config"

    def value(self, key: str) -> Any:
        """A value as it stands there; None if there is none."""
        return self.table.get(key)

    def text(self, key: str, default: str = "") -> str:
        """A text, in small letters; "" or the default if there is none."""
        value = self.table.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "is not a text")
        return value.lower()

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.table.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "is not true or false")
        return value

    def number(self, key: str, *, among: Sequence[int] = (), default: int | None = None) -> int:
        """A whole number, perhaps one of a few."""
        value = self.table.get(key, default)
        value = default if value is None else value
        if value is None:
            raise self.wrong(key, "is missing")
        if type(value) is not int or (among and value not in among):
            choices = f", but {' or '.join(map(str, among))} is wanted" if among else ""
            raise self.wrong(key, f"is {str(value)[:40]!r}{choices}")
        return value

    def inner(self, key: str) -> QuantSettings | None:
        """A table of the table; None if there is none."""
        value = self.table.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, "is not a table")
        return QuantSettings(value, self.path, self._full(key))

    def wrong(self, key: str, reason: str) -> CheckpointError:
        """An error about a key."""
        return CheckpointError(self.path, f"{self._full(key)} {reason}")

    def refused(self, what: str) -> CheckpointError:
        """An error about a way to quantize that cannot be read."""
        said = self.name or "it"
        return CheckpointError(
            self.path, f"{said} says {what}, which jinfer does not read: {INSTEAD}"
        )

    def _full(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

"""Which tensor of a checkpoint holds which parameter of the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinfer.spec.errors import SpecError, nearest
from jinfer.spec.reader import read
from jinfer.spec.values import Values

FORMATS = ("gguf", "llama2c")
_GROUP = re.compile(r"\{([A-Za-z0-9_,]+)\}")


@dataclass(frozen=True)
class Entry:
    """One line of a `[tensors]` table.

    Attributes:
        names: the file's name, or several of which the first that exists is taken.
        groups: a fused tensor holds its parts once per group, [group, (part, part, ...), ...].
        transpose: the file has the matrix as [in, out].
        layer: where this entry's {i} ends up; part names in their order in the file.
    """

    names: tuple[str, ...]
    parts: tuple[str, ...] = ()
    groups: int = 1
    transpose: bool = False


@dataclass(frozen=True)
class Place:
    """Where a parameter is: candidates for the file's tensor, and the parts fused in it.

    Attributes:
        names: the file's names, the first that exists counts.
        parts: every parameter fused in that tensor, in order; empty if it is alone.
        groups, transpose: as in `Entry`.
    """

    names: tuple[str, ...]
    parts: tuple[str, ...]
    groups: int
    transpose: bool


@dataclass(frozen=True)
class TensorMap:
    """Parameter names to file names, for one checkpoint format.

    Attributes:
        entries: (pattern of the parameter's name, entry), the ones that win first.
        prefixes: the file's names may or may not begin with one of these.
        ignore: glob patterns of tensors that the model has no use for.
    """

    entries: tuple[tuple[str, Entry], ...]
    prefixes: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def place(self, parameter: str) -> Place | None:
        """Where to look for a parameter such as "decoder.3.attn.q.weight"; None if unmapped."""
        module, leaf = parameter.rsplit(".", 1)
        return self._find(parameter, "") or self._find(module, "." + leaf)

    def _find(self, name: str, leaf: str) -> Place | None:
        for pattern, entry in self.entries:
            found = _regex(pattern).fullmatch(name)
            if not found:
                continue
            layer = found.groupdict().get("i") or ""
            parts = tuple(part.replace("{i}", layer) + leaf for part in entry.parts)
            names = tuple(source.replace("{i}", layer) + leaf for source in entry.names)
            return Place(names, parts, entry.groups, entry.transpose)
        return None

    def unmatched(self, modules: Sequence[str]) -> Iterator[str]:
        """Patterns that name none of the given module or parameter names."""
        for pattern, _ in self.entries:
            if not any(_regex(pattern).fullmatch(module) for module in modules):
                yield pattern


def _regex(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(pattern).replace(r"\{i\}", r"(?P<i>\d+)")
    group = re.compile(r"\\\{([A-Za-z0-9_,]+)\\\}")
    return re.compile(group.sub(lambda m: "(?:" + m[1].replace(",", "|") + ")", escaped))


def read_tensor_map(layers: Sequence[Mapping[str, Any]], format: str, values: Values) -> TensorMap:
    """Reads the `[tensors]` tables that apply to a checkpoint format.

    Args:
        layers: the `[tensors]` tables from the most general (a format's) to the most specific.
        format: "safetensors" and "pickle" share the names at the top; others have a sub-table.
    """
    entries: list[tuple[str, Entry]] = []
    prefixes: list[str] = []
    ignore: list[str] = []
    for layer in layers:
        named = format in FORMATS
        table = layer.get(format, {}) if named else _without_formats(layer)
        where = f"tensors.{format}" if named else "tensors"
        own = []
        for pattern, written in table.items():
            key = f"{where}.{pattern!r}"
            if pattern in ("prefix", "ignore"):
                target = prefixes if pattern == "prefix" else ignore
                target += [written] if isinstance(written, str) else written
            else:
                own += list(_read_entry(pattern, written, values, key))
        entries = own + entries
    return TensorMap(tuple(entries), tuple(prefixes), tuple(ignore))


def _without_formats(layer: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in layer.items() if name not in FORMATS}


def _read_entry(
    pattern: str, written: Any, values: Values, key: str
) -> Iterator[tuple[str, Entry]]:
    table = written if isinstance(written, Mapping) else {"from": written}
    allowed = ("from", "groups", "transpose")
    for name in table:
        if name not in allowed:
            raise SpecError(values.path, f"{key}.{name}", f"unknown key; {nearest(name, allowed)}")
    source = table.get("from")
    names = (source,) if isinstance(source, str) else tuple(source or ())
    if not names or not all(isinstance(name, str) for name in names):
        raise SpecError(values.path, key, "needs the file's tensor name, or a list of names to try")
    groups = read(int, table.get("groups", 1), values, f"{key}.groups")
    transpose = read(bool, table.get("transpose", False), values, f"{key}.transpose")
    found = [match for match in _GROUP.finditer(pattern) if match[1] != "i"]
    if len(found) > 1:
        raise SpecError(values.path, key, "has more than one {a,b,...} group")
    parts: tuple[str, ...] = ()
    if found:
        head, tail = pattern[: found[0].start()], pattern[found[0].end() :]
        parts = tuple(head + part + tail for part in found[0][1].split(","))
    yield pattern, Entry(names, parts, groups, transpose)

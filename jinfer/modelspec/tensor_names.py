"""Tensor names: which tensor of a checkpoint holds which parameter of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from jinfer.modelspec.bounded_types import Count, Size
from jinfer.modelspec.spec_errors import SpecError, show_value
from jinfer.modelspec.spec_values import SpecValues
from jinfer.modelspec.table_reader import read_value
from jinfer.modelspec.toml_tables import as_table, check_keys, check_text, check_texts

FORMATS = ("gguf", "llama2c")
_LAYERS = "{layers}"  # in `ignore`: the index after the last layer's, and those that follow
_BEYOND = 8  # how many they are: layers of heads that draft, of which models have one to three
_OF_LAYER = re.compile(r"\{(?![ie]\})[^{}]*\bi\b[^{}]*\}")  # an expression of the layer's number
_GROUP = re.compile(r"\{([A-Za-z0-9_]+(?:,[A-Za-z0-9_]+)+)\}")


@dataclass(frozen=True)
class TensorEntry:
    """One line of a `[tensors]` table.

    Attributes:
        names: the file's name, or several of which the first that exists is used; {e} enumerates
            tensors that are stacked along a new first axis.
        numbers: what other braces in the names stand for, in each layer; None: nothing there.
        parts: parameters fused in that tensor, in order; {i} is the layer.
        groups: a fused tensor repeats its parts once per group: [group, (part, part, ...), ...].
        axis: axis of the file's tensor along which its parts are concatenated.
        transpose: the file has matrices as [in, out].
        layers: the file's tensor is that of so many layers, its parts; 0: of one.
        pieces: the file's first axis is divided in so many, which become a new first axis.
        sum: axis of the file's tensor that is summed up, as time of a 3-d convolution of still
            images; 0: none.
        table: index of the table that contains the line.
        value: the parameter's value, where no tensor but the checkpoint's config has it.
    """

    names: tuple[str, ...]
    parts: tuple[str, ...] = ()
    groups: int = 1
    axis: int = 0
    transpose: bool = False
    layers: int = 0
    pieces: int = 1
    sum: int = 0
    numbers: tuple[tuple[str, tuple[int | None, ...]], ...] = ()
    table: int = 0
    value: float | None = None

    def names_in(self, layer: str, first: int) -> tuple[str, ...]:
        """The names in a layer ("" outside of layers), if the file's first one is `first`."""
        names = self.names
        if layer:
            known: dict[str, int | None] = {"{i}": int(layer) + first}
            known |= {t: n[int(layer)] for t, n in self.numbers if int(layer) < len(n)}
            for text, number in known.items():
                if number is not None:
                    names = tuple(name.replace(text, str(number)) for name in names)
        return names


@dataclass(frozen=True)
class TensorSource:
    """The tensor of a parameter: candidate names, and the parameters fused in it.

    Attributes:
        names: the file's names, of which the first that exists is used; may have {e}, as in
            `TensorEntry`.
        parts: all parameters fused in that tensor, in order; empty if it is alone.
        groups, axis, transpose, layers, pieces, sum, value: as in `TensorEntry`.
        fallback: the source in a file that has none of these.
        table: as in `TensorMap`.
    """

    names: tuple[str, ...]
    parts: tuple[str, ...] = ()
    groups: int = 1
    axis: int = 0
    transpose: bool = False
    layers: int = 0
    pieces: int = 1
    sum: int = 0
    fallback: TensorSource | None = None
    table: str = "tensors"
    value: float | None = None

    def candidates(self) -> Iterator[TensorSource]:
        """This source and its fallbacks, in order."""
        place: TensorSource | None = self
        while place is not None:
            yield place
            place = place.fallback


@dataclass(frozen=True)
class OmittedModule:
    """A module that the model does not have.

    Attributes:
        key: path of its `when` ("encoder.modules.mlm_dense.when").
        when: the condition, as written.
        names: the file's names for its tensors, or prefixes of them.
    """

    key: str
    when: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class TensorMap:
    """Parameter names to file names, for one checkpoint format.

    Attributes:
        entries: (pattern of the parameter's name, entry), by precedence.
        prefixes: prefixes that the file's names may have -> their replacements.
        ignore: glob patterns of tensors that the model does not use.
        suffixes: other suffixes of the file's names -> "weight" or "bias".
        copies: parameter -> the file's names of duplicate tensors.
        first: the file's number of the first layer.
        table: the specification's table, for errors: "tensors", or a format's, "tensors.gguf".
        omitted: modules that have names here, but that the checkpoint lacks by their `when`.
    """

    entries: tuple[tuple[str, TensorEntry], ...]
    prefixes: tuple[tuple[str, str], ...] = ()
    ignore: tuple[str, ...] = ()
    suffixes: tuple[tuple[str, str], ...] = ()
    copies: tuple[tuple[str, tuple[str, ...]], ...] = ()
    first: int = 0
    table: str = "tensors"
    omitted: tuple[OmittedModule, ...] = ()

    @property
    def patterns(self) -> tuple[str, ...]:
        """Glob patterns of the file's names for all parameters."""
        names = [name for _, entry in self.entries for name in entry.names]
        for prefix, usual in reversed(self.prefixes):
            names += [prefix + n.removeprefix(usual) for n in names if n.startswith(usual)]
        return tuple(dict.fromkeys(re.sub(r"\{[^{}]*\}", "*", name) + "*" for name in names))

    def omitted_owners(self, names: Iterable[str]) -> list[OmittedModule]:
        """The omitted modules to which some of these tensors belong."""
        bare = [name.removeprefix(p) for name in names for p in ("", *dict(self.prefixes))]
        result = []
        for each in self.omitted:
            parts = "|".join(_regex(n).pattern for n in each.names).replace("(?P<i>", "(?:")
            if any(re.match(rf"(?:{parts})(?:\.|$)", name) for name in bare):
                result.append(each)
        return result

    def source_of(self, parameter: str) -> TensorSource | None:
        """The tensor of a parameter such as "decoder.3.attn.q.weight"; None if unmapped.

        The most specific table with a line for it decides. Of several lines there, one that names
        the parameter precedes those that name its module; later ones are fallbacks for files that
        lack the tensors of the first.
        """
        module, _, leaf = parameter.rpartition(".")
        found = [*self._find(parameter, ""), *self._find(module, "." + leaf)]
        last = max((table for table, _ in found), default=0)
        place: TensorSource | None = None
        for table, each in reversed(found):
            if table == last:
                place = replace(each, fallback=place)
        return place

    @cached_property
    def _by_ending(self) -> list[tuple[str, str, TensorEntry]]:
        """The entries, with how a name ends that a pattern may match."""
        return [(pattern.rpartition("}")[2], pattern, entry) for pattern, entry in self.entries]

    def _find(self, name: str, leaf: str) -> Iterator[tuple[int, TensorSource]]:
        for end, pattern, entry in self._by_ending:
            found = _regex(pattern).fullmatch(name) if name.endswith(end) else None
            if not found:
                continue
            layer = found.groupdict().get("i") or ""
            parts = tuple(part.replace("{i}", layer) + leaf for part in entry.parts)
            if entry.layers:
                parts = tuple(pattern.replace("{i}", str(n)) + leaf for n in range(entry.layers))
            names = tuple(name + leaf for name in entry.names_in(layer, self.first))
            where = (entry.groups, entry.axis, entry.transpose, entry.layers, entry.pieces)
            found_in = TensorSource(
                names, parts, *where, entry.sum, table=self.table, value=entry.value
            )
            yield entry.table, found_in


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    def piece(text: str) -> str:
        if text == "{i}":
            return "(?P<i>[0-9]+)"
        group = _GROUP.fullmatch(text)
        return f"(?:{group[1].replace(',', '|')})" if group else re.escape(text)

    return re.compile("".join(map(piece, re.split(r"(\{[^{}]*\})", pattern))))


def read_tensor_map(
    layers: Sequence[Mapping[str, Any]], format: str, values: SpecValues
) -> TensorMap:
    """Reads the `[tensors]` tables that apply to a checkpoint format.

    Args:
        layers: the `[tensors]` tables from the most general (a format's) to the most specific.
        format: "safetensors" and "pickle" share the top-level names; others have a sub-table.

    Raises:
        SpecError: an entry that does not follow docs/specs.md.
    """
    entries: list[tuple[str, TensorEntry]] = []
    ignore: list[str] = []
    prefixes: dict[str, str] = {}
    suffixes: dict[str, str] = {}
    copies: dict[str, tuple[str, ...]] = {}
    first = 0
    where = f"tensors.{format}" if format in FORMATS else "tensors"
    for number, layer in enumerate(layers):
        own = []
        for name, written in _table_of(layer, format, values.path).items():
            key = f"{where}.{name}"
            if name == "first":
                first = read_value(Count, written, values, key)
            elif name == "ignore":
                for text in check_texts(written, values.path, key):
                    ignore += _ignored(text, values, key)
            elif name == "prefix" and not isinstance(written, Mapping):
                prefixes |= dict.fromkeys(check_texts(written, values.path, key), "")
            elif name in ("prefix", "suffixes"):
                known = prefixes if name == "prefix" else suffixes
                for part, usual in as_table(written, values.path, key).items():
                    known[part] = check_text(usual, values.path, f"{key}.{part}")
            elif name == "copies":
                for parameter, names in as_table(written, values.path, key).items():
                    texts = check_texts(names, values.path, f"{key}.{parameter}")
                    copies[parameter] = tuple(texts)
            else:
                given = isinstance(written, Mapping) and "value" in written
                read = _read_values if given else _read_entry
                for each, entry in read(name, written, values, f"{where}.{name!r}"):
                    own.append((each, replace(entry, table=number)))
        entries = own + entries
    return TensorMap(
        tuple(entries),
        tuple(prefixes.items()),
        tuple(ignore),
        tuple(suffixes.items()),
        tuple(copies.items()),
        first,
        where,
    )


def _ignored(text: str, values: SpecValues, key: str) -> Iterator[str]:
    """The patterns that one of `ignore` is: several for layers, after the last one or by `i`."""
    if _LAYERS in text:
        count = int(values.dim("layers", key))
        yield from (text.replace(_LAYERS, str(count + n)) for n in range(_BEYOND))
    elif found := _OF_LAYER.search(text):
        numbers, _ = _number_of_layers(found[0], values, key)
        yield from (text.replace(found[0], str(n)) for n in numbers if n is not None)
    else:
        yield text


def _table_of(tensors: Any, format: str, path: object) -> Mapping[str, Any]:
    """The part of a `[tensors]` table for a format."""
    table = as_table(tensors, path, "tensors")
    named = {name: as_table(table.get(name, {}), path, f"tensors.{name}") for name in FORMATS}
    if format in FORMATS:
        return named[format]
    return {name: value for name, value in table.items() if name not in FORMATS}


def _read_values(
    pattern: str, written: Any, values: SpecValues, key: str
) -> Iterator[tuple[str, TensorEntry]]:
    """Entries of parameters whose values are given, one for each layer."""
    table = check_keys(written, ("value",), values.path, key)
    whole = "{i}" not in pattern
    for i in range(1 if whole else int(values.dim("layers", key))):
        at = replace(values, names=values.names if whole else {**values.names, "i": i})
        value = read_value(float, table["value"], at, f"{key}.value")
        yield pattern.replace("{i}", str(i)), TensorEntry((), value=value)


def _read_entry(
    pattern: str, written: Any, values: SpecValues, key: str
) -> Iterator[tuple[str, TensorEntry]]:
    path = values.path
    table = written if isinstance(written, Mapping) else {"from": written}
    allowed = ("from", "groups", "axis", "transpose", "layers", "pieces", "sum")
    check_keys(table, allowed, path, key)
    names = check_texts(table.get("from", []), path, key)
    if not names or not all(names):
        raise SpecError(path, key, "needs the file's tensor name, or a list of names to try")
    if pattern.count("{i}") > 1:
        raise SpecError(path, key, "has {i} more than once")
    if "{i}" not in pattern and any("{i}" in n or _OF_LAYER.search(n) for n in names):
        raise SpecError(path, key, "has no {i}, but the file's name has")
    if "{e}" in pattern:
        raise SpecError(path, key, "has {e}, which only the file's name can have")
    numbers = tuple(_numbers({t for name in names for t in _OF_LAYER.findall(name)}, values, key))
    for text in (pattern, *names):
        known = _GROUP.sub("", text) if text is pattern else _OF_LAYER.sub("", text)
        if strange := re.search(r"\{[^{}]*\}?|\}", re.sub(r"\{[ie]\}", "", known)):
            of_file = "{i}, {e} and values of i, as {i % 2}"
            what = of_file if text is not pattern else "{i} and one {a,b,...}"
            reason = f"{show_value(strange[0])} in {show_value(text)} is no placeholder"
            raise SpecError(path, key, f"{reason}; in braces there can be {what}")
    found = list(_GROUP.finditer(pattern))
    if len(found) > 1:
        raise SpecError(path, key, "has more than one {a,b,...} group")
    parts: tuple[str, ...] = ()
    if found:
        head, tail = pattern[: found[0].start()], pattern[found[0].end() :]
        parts = tuple(head + part + tail for part in found[0][1].split(","))
    groups = read_value(Size, table.get("groups", 1), values, f"{key}.groups")
    axis = read_value(Count, table.get("axis", 0), values, f"{key}.axis")
    layers = read_value(Count, table.get("layers", 0), values, f"{key}.layers")
    pieces = read_value(Size, table.get("pieces", 1), values, f"{key}.pieces")
    summed = read_value(Count, table.get("sum", 0), values, f"{key}.sum")
    if layers and (parts or "{i}" not in pattern or any("{i}" in name for name in names)):
        raise SpecError(path, f"{key}.layers", "is for one tensor of a module of all layers")
    for name, given in (("groups", groups > 1), ("axis", axis > 0)):
        if given and not parts and not layers:
            raise SpecError(path, f"{key}.{name}", "is for fused tensors, such as 'attn.{q,k,v}'")
    transpose = read_value(bool, table.get("transpose", False), values, f"{key}.transpose")
    where = (groups, axis, transpose, layers, pieces, summed)
    yield pattern, TensorEntry(names, parts, *where, numbers)


def _numbers(
    texts: Iterable[str], values: SpecValues, key: str
) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    """What braces stand for in each layer: their expression, of the layer's number `i`.

    Layers that it has no value for cannot have the parameter.
    """
    for text in sorted(texts):
        found, wrong = _number_of_layers(text, values, key)
        if all(number is None for number in found):
            reason = f"{text} is no whole number from 0 on in any layer"
            raise wrong[0] if wrong else SpecError(values.path, key, reason)
        yield text, tuple(found)


def _number_of_layers(
    text: str, values: SpecValues, key: str
) -> tuple[list[int | None], list[SpecError]]:
    """The value of an expression in braces in each layer, if it is a number, and what was wrong."""
    found, wrong = list[int | None](), list[SpecError]()
    count = int(values.dim("layers", key))
    for i in range(count):
        try:
            value = values.value(text[1:-1], key, names={"i": i, "layers": count})
        except SpecError as error:
            wrong.append(error)
            value = None
        found.append(value if isinstance(value, int) and value >= 0 else None)
    return found, wrong

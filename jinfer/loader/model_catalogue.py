"""Model catalogue: a table of the models whose specifications come with jinfer."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jinfer.loader.config.source_errors import SourceError
from jinfer.loader.sources import is_local
from jinfer.loader.weights.model_size import WIDTHS, Sizes, count_text, gib_text, sizes_of
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.resolve_spec import STACKS, CheckpointFacts, resolve
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import (
    families,
    model_specs,
    read_toml,
    specs_folder,
    with_families,
)
from jinfer.modelspec.toml_tables import check_parameters

_HEADS = ("name", "type", "size", "GiB in q4", "here")
_NUMBERS = range(2, 4)
_MEMORY_HEADS = ("name", "family", "type", "size", *(f"{bits:g}" for bits in WIDTHS), "source")
_MEMORY_NUMBERS = range(3, 4 + len(WIDTHS))
_WIDEST = 31  # a few longer names push their rows to the right, so that most fit 160 columns
_TYPES = {"decoder-only": "decoder", "encoder-only": "encoder", "encoder-decoder": "enc-dec"}
_NOTE = (
    "size: parameters. GiB in q4: memory at 4 bits, without a cache (~: as if all\n"
    "were matrices). here: the weights are on this machine; 'jinfer pull NAME' gets\n"
    "others. 'jinfer list --memory' shows other widths, families and sources."
)
_MEMORY_NOTE = (
    "size: parameters; then the memory without a cache, in GiB, at 2 to 32 bits (with ~: as if all "
    "were matrices, whose share only the checkpoint tells)"
)


@dataclass(frozen=True)
class Entry:
    """A model specification of `specs/`.

    Attributes:
        parameters: number of parameters; None if neither the specification nor a local checkpoint
            has it.
        exact: whether the size of each array is known, not only the number of parameters.
        memory: bytes at each of `WIDTHS`, without a cache.
        source: the source of its weights.
    """

    name: str
    family: str
    type: str
    parameters: int | None
    exact: bool
    memory: tuple[int, ...]
    source: str


def entries(folder: Path | None = None, text: str = "") -> Iterator[Entry]:
    """Yield the model specifications by name.

    Args:
        text: a part of their name or of their family's name, or a pattern that matches it.

    Raises:
        SpecError: a specification is invalid.
    """
    for name, path in model_specs(folder).items():
        table = read_toml(path)
        family = str(table.get("family", "-")).removesuffix(".toml")
        if not any(_fits(known, text) for known in (name, family)):
            continue
        tables = with_families(table, path)
        stacks = {stack for own in tables for stack in STACKS if stack in own}
        kind = "-".join(sorted(stacks, reverse=True))
        parameters, sizes = table.get("parameters"), None
        if parameters is not None:
            counts: Any = check_parameters(parameters, path)
            sizes = Sizes(**counts)
        elif (spec := _resolved(path)) is not None:
            sizes = sizes_of(spec)
        yield Entry(
            name=name,
            family=family,
            type=kind if len(stacks) > 1 else f"{kind}-only",
            parameters=sizes.parameters if sizes else None,
            exact=sizes is not None and not isinstance(parameters, str),
            memory=tuple(sizes.total_bytes(bits) for bits in WIDTHS) if sizes else (),
            source=str(table.get("weights", "-")),
        )


def _fits(name: str, text: str) -> bool:
    """Whether a name contains a text, or matches it if it is a pattern."""
    pattern = text if set(text) & set("*?[") else f"*{text}*"
    return fnmatchcase(name.lower(), pattern.lower())


def _resolved(path: Path) -> ModelSpec | None:
    """Resolve a model from its specification, or with a local checkpoint; None if impossible."""
    tables = with_families(read_toml(path), path)
    try:
        return resolve(tables, str(path), CheckpointFacts(), {})
    except SpecError:
        pass
    if str(tables[-1].get("weights", "")).startswith("hf://"):
        return None  # a list downloads nothing
    # Imported here, because it imports JAX, and nearly every specification has the size.
    from jinfer.loader.checkpoint import CheckpointError
    from jinfer.loader.open_model import open_files
    from jinfer.loader.resolve_model import resolve_model

    try:
        return resolve_model(open_files(path, {}), {})[0]
    except (SourceError, CheckpointError, SpecError):
        return None


def table(folder: Path | None = None, text: str = "", *, memory: bool = False) -> str:
    """Return the catalogue as text; an unknown size is "-".

    Args:
        text: as in `entries`.
        memory: show the memory at each width, families and sources, in lines of 160 columns.

    Raises:
        SpecError: nothing matches, or a specification is invalid.
    """
    found = list(entries(folder, text))
    if not found:
        near = get_close_matches(text, [*model_specs(), *families()], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SpecError(repr(text), "", f"fits the name of no model or family{hint}")
    if memory:
        return _lines([_MEMORY_HEADS, *map(_memory_row, found)], _MEMORY_NUMBERS, _MEMORY_NOTE)
    base = folder or specs_folder()
    return _lines([_HEADS, *(_row(entry, base) for entry in found)], _NUMBERS, _NOTE)


def _row(entry: Entry, base: Path) -> tuple[str, ...]:
    memory = gib_text(entry.memory[WIDTHS.index(4)]) if entry.memory else "-"
    here = "yes" if is_local(entry.source, base) else ""
    return (entry.name, _TYPES[entry.type], _count(entry), memory, here)


def _memory_row(entry: Entry) -> tuple[str, ...]:
    memory = [gib_text(size) for size in entry.memory] or ["-"] * len(WIDTHS)
    kind = _TYPES[entry.type]
    return (entry.name, entry.family, kind, _count(entry), *memory, entry.source)


def _count(entry: Entry) -> str:
    about = "" if entry.exact else "~"
    return "-" if entry.parameters is None else about + count_text(entry.parameters)


def _lines(rows: Sequence[Sequence[str]], numbers: Container[int], note: str) -> str:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    if len(widths) == len(_MEMORY_HEADS):
        widths = [min(width, _WIDEST) for width in widths]
    lines = [
        " ".join(
            f"{cell:{'>' if n in numbers else '<'}{widths[n]}}" for n, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, "", note])

"""The models whose specifications come with jinfer, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jinfer.checkpoint import CheckpointError
from jinfer.recognize import open_source
from jinfer.sizes import bytes_text, count_text, sizes_of, stored_bits
from jinfer.sources import SourceError
from jinfer.spec.errors import SpecError
from jinfer.spec.files import read_toml, specs_folder, with_families
from jinfer.spec.model import ModelSpec
from jinfer.spec.resolve import STACKS, Facts, resolve
from jinfer.spec.tables import check_count

_BITS = (16, 8, 4)
_HEADS = ("name", "family", "type", "parameters", *(f"{bits} bits" for bits in _BITS), "source")


@dataclass(frozen=True)
class Entry:
    """A model specification of `specs/`.

    Attributes:
        parameters: how many; None where neither the specification nor a checkpoint at hand says.
        memory: bytes at each of 16, 8 and 4 bits, without a cache.
        source: where its weights come from.
    """

    name: str
    family: str
    type: str
    parameters: int | None
    memory: tuple[int, ...]
    source: str


def entries(folder: Path | None = None) -> Iterator[Entry]:
    """Every model specification, by name. Raises `SpecError` for one that is wrong."""
    for path in sorted((folder or specs_folder()).glob("*.toml")):
        table = read_toml(path)
        tables = with_families(table, path)
        stacks = {stack for each in tables for stack in STACKS if stack in each}
        spec = _resolved(path)
        parameters: int | None = None
        memory: tuple[int, ...] = ()
        if spec is not None:
            sizes = sizes_of(spec)
            parameters = sizes.parameters
            memory = tuple(sizes.total_bytes(bits) for bits in _BITS)
        elif "parameters" in table:
            parameters = check_count(table["parameters"], path, "parameters")
            memory = tuple(round(parameters * stored_bits(bits) / 8) for bits in _BITS)
        kind = "-".join(sorted(stacks, reverse=True))
        yield Entry(
            name=path.stem,
            family=str(table.get("family", "-")).removesuffix(".toml"),
            type=kind if len(stacks) > 1 else f"{kind}-only",
            parameters=parameters,
            memory=memory,
            source=str(table.get("weights", "-")),
        )


def _resolved(path: Path) -> ModelSpec | None:
    """The model, if its sizes are known: from the specification alone, or a checkpoint at hand."""
    tables = with_families(read_toml(path), path)
    try:
        return resolve(tables, str(path), Facts(), {})
    except SpecError:
        pass
    if str(tables[-1].get("weights", "")).startswith("hf://"):
        return None  # a list downloads nothing
    try:
        return open_source(path, {}).spec({})
    except (SourceError, CheckpointError, SpecError):
        return None


def table(folder: Path | None = None) -> str:
    """The catalogue as text; "-" where a size is not known without the checkpoint."""
    rows = [_HEADS]
    for entry in entries(folder):
        count = "-" if entry.parameters is None else count_text(entry.parameters)
        memory = [bytes_text(size) for size in entry.memory] or ["-"] * len(_BITS)
        rows.append((entry.name, entry.family, entry.type, count, *memory, entry.source))
    widths = [max(len(row[n]) for row in rows) for n in range(len(_HEADS))]
    numbers = range(3, 4 + len(_BITS))
    return "\n".join(
        "  ".join(
            f"{cell:{'>' if n in numbers else '<'}{widths[n]}}" for n, cell in enumerate(row)
        ).rstrip()
        for row in rows
    )

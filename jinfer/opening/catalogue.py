"""The models whose specifications come with jinfer, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from jinfer.opening.sources import SourceError
from jinfer.records import dataclass
from jinfer.spec.errors import SpecError
from jinfer.spec.files import read_toml, specs_folder, with_families
from jinfer.spec.model import ModelSpec
from jinfer.spec.resolve import STACKS, Facts, resolve
from jinfer.spec.tables import check_parameters
from jinfer.weights.sizes import WIDTHS, Sizes, count_text, gib_text, sizes_of

_HEADS = ("name", "family", "type", "size", *(f"{bits:g}" for bits in WIDTHS), "source")
_NUMBERS = range(3, 4 + len(WIDTHS))
_WIDEST = 31  # a few longer names push their rows to the right, so that most fit 160 columns
_TYPES = {"decoder-only": "decoder", "encoder-only": "encoder", "encoder-decoder": "enc-dec"}
_NOTE = (
    "size: parameters; then the memory without a cache, in GiB, at 2 to 32 bits (with ~: as if all "
    "were matrices, whose share only the checkpoint tells)"
)


@dataclass(frozen=True)
class Entry:
    """A model specification of `specs/`.

    Attributes:
        parameters: how many; None where neither the specification nor a checkpoint at hand says.
        exact: whether the size of each of its arrays is known, not only how many parameters it has.
        memory: bytes at each of `WIDTHS`, without a cache.
        source: where its weights come from.
    """

    name: str
    family: str
    type: str
    parameters: int | None
    exact: bool
    memory: tuple[int, ...]
    source: str


def entries(folder: Path | None = None, text: str = "") -> Iterator[Entry]:
    """Every model specification, by name.

    Args:
        text: only those that have it in their name or their family's, or match it as a pattern.

    Raises:
        SpecError: a specification is wrong.
    """
    for path in sorted((folder or specs_folder()).glob("*.toml")):
        table = read_toml(path)
        family = str(table.get("family", "-")).removesuffix(".toml")
        if not any(_fits(name, text) for name in (path.stem, family)):
            continue
        tables = with_families(table, path)
        stacks = {stack for each in tables for stack in STACKS if stack in each}
        kind = "-".join(sorted(stacks, reverse=True))
        said, sizes = table.get("parameters"), None
        if said is not None:
            sizes = Sizes(**check_parameters(said, path))
        elif (spec := _resolved(path)) is not None:
            sizes = sizes_of(spec)
        yield Entry(
            name=path.stem,
            family=family,
            type=kind if len(stacks) > 1 else f"{kind}-only",
            parameters=sizes.parameters if sizes else None,
            exact=sizes is not None and not isinstance(said, str),
            memory=tuple(sizes.total_bytes(bits) for bits in WIDTHS) if sizes else (),
            source=str(table.get("weights", "-")),
        )


def _fits(name: str, text: str) -> bool:
    """Whether a name has a text in it, or matches it if that is a pattern."""
    pattern = text if set(text) & set("*?[") else f"*{text}*"
    return fnmatchcase(name.lower(), pattern.lower())


def _resolved(path: Path) -> ModelSpec | None:
    """The model, if its sizes are known: from the specification alone, or a checkpoint at hand."""
    tables = with_families(read_toml(path), path)
    try:
        return resolve(tables, str(path), Facts(), {})
    except SpecError:
        pass
    if str(tables[-1].get("weights", "")).startswith("hf://"):
        return None  # a list downloads nothing
    # Here, because it needs JAX, and nearly every specification says how large its model is.
    from jinfer.checkpoint import CheckpointError
    from jinfer.opening.recognize import open_source

    try:
        return open_source(path, {}).spec({})
    except (SourceError, CheckpointError, SpecError):
        return None


def table(folder: Path | None = None, text: str = "") -> str:
    """The catalogue, or of it what fits a text, for reading; "-" where a size is not known.

    Raises:
        SpecError: nothing fits, or a specification is wrong.
    """
    found = list(entries(folder, text))
    if not found:
        near = get_close_matches(text, [path.stem for path in specs_folder().glob("**/*.toml")], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SpecError(f"--list {text!r}", "", f"fits the name of no model or family{hint}")
    rows = [_HEADS]
    for entry in found:
        about = "" if entry.exact else "~"
        count = "-" if entry.parameters is None else about + count_text(entry.parameters)
        memory = [gib_text(size) for size in entry.memory] or ["-"] * len(WIDTHS)
        rows.append((entry.name, entry.family, _TYPES[entry.type], count, *memory, entry.source))
    widths = [min(max(len(row[n]) for row in rows), _WIDEST) for n in range(len(_HEADS))]
    lines = [
        " ".join(
            f"{cell:{'>' if n in _NUMBERS else '<'}{widths[n]}}" for n, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, "", _NOTE])

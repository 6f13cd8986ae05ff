"""Specification files: reading them, and finding the family of a checkpoint."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from jinfer.disk_cache import content_of
from jinfer.modelspec.resolve_spec import CheckpointFacts, matches
from jinfer.modelspec.spec_errors import SpecError, nearest_hint, show_value
from jinfer.modelspec.toml_tables import Table, check_plain, merge, nested
from jinfer.sandbox.safe_files import FileRefusedError, path_exists, read_regular_file

MODELS = "models"  # name of the file that has several models
MAX_BYTES = 1 << 20  # of a specification; the longest bundled one has 10,000
# The parser's time and memory are quadratic in the parts of a dotted key; this bounds both.
MAX_PARTS = 2000**2
CLASSIFIES = "ForSequenceClassification"  # the end of an architecture's name
_FRACTION = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.])")


@cache
def specs_folder() -> Path:
    """The folder of the bundled specifications: installed with jinfer, or in the checkout."""
    package = Path(__file__).parents[1]
    installed = package / "specs_data"
    return installed if installed.is_dir() else package.parent / "specs"


def model_specs(folder: Path | None = None) -> dict[str, Path]:
    """The models of a folder of specifications by name; None: the bundled ones.

    A model is a file, `NAME.toml`, or a table of `models.toml`, of which the path is `NAME.toml`
    as well: `read_toml` reads it.
    """
    folder = folder or specs_folder()
    files = {path.stem for path in folder.glob("*.toml")} - {MODELS}
    return {name: folder / f"{name}.toml" for name in sorted(files | _model_tables(folder).keys())}


def is_model_table(path: Path) -> bool:
    """Whether a path is that of a table of the bundled `models.toml`."""
    return path.parent == specs_folder() and path.stem in _model_tables(path.parent)


def _model_tables(folder: Path) -> Table:
    path = folder / f"{MODELS}.toml"
    return _parsed(path, _content(path)) if path_exists(path) else {}


def read_toml(path: Path) -> Table:
    """Read a TOML file, or a model's table of the bundled `models.toml`. Raises `SpecError`."""
    if is_model_table(path) and not path_exists(path):
        table: Table = _model_tables(path.parent)[path.stem]
        return table
    return _parsed(path, _content(path))


def _content(path: Path) -> bytes:
    try:
        return read_regular_file(path, MAX_BYTES)
    except FileRefusedError as error:
        raise SpecError(path, "", str(error)) from None


@lru_cache(maxsize=512)  # by content: in a notebook, files are edited and read again
def _parsed(path: Path, content: bytes) -> Table:
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
        if _parts(text) > MAX_PARTS:
            raise SpecError(path, "", "has a line with too many dots")
        table = tomllib.loads(text)
    except SpecError:
        raise
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or infinite numbers
        raise SpecError(path, "", f"is not TOML: {error}") from error
    check_plain(table, path)
    return table


def _parts(text: str) -> int:
    """The sum over lines of the squared number of dots, without those of fractions."""
    return sum(line.count(".") ** 2 for line in _FRACTION.sub("", text).split("\n"))


def families() -> dict[str, Path]:
    """The bundled families by name."""
    folder = specs_folder() / "families"
    names = sorted(name for name in os.listdir(folder) if name.endswith(".toml"))
    return {name.removesuffix(".toml"): folder / name for name in names}


def with_families(table: Table, path: Path) -> list[Table]:
    """A specification's tables from the most general: its family's parent, its family, itself."""
    tables, seen = [table], {path}
    while "family" in tables[0]:
        path = _family_file(tables[0]["family"], path)
        if path in seen:
            raise SpecError(path, "family", "the families name each other in a circle")
        seen.add(path)
        tables.insert(0, read_toml(path))
    return tables


def _family_file(name: Any, spec_path: Path) -> Path:
    known = families()
    if isinstance(name, str) and name in known:
        return known[name]
    if not isinstance(name, str) or not name.endswith(".toml"):
        raise SpecError(
            spec_path, "family", f"unknown family {show_value(name)}; {nearest_hint(name, known)}"
        )
    try:
        return (spec_path.parent / name).resolve()
    except (OSError, ValueError) as error:  # a cycle of links, a null character
        raise SpecError(spec_path, "family", f"{show_value(name)} is no file: {error}") from error


def format_table(format: str) -> Table:
    """The defaults of a checkpoint format (`specs/formats`)."""
    path = specs_folder() / "formats" / f"{format}.toml"
    return read_toml(path) if path_exists(path) else {}


def architecture_of(model_type: str) -> str | None:
    """The default architecture of a `model_type` in config.json."""
    known = format_table("architectures").get(model_type)
    return known if isinstance(known, str) else None


def image_layer(
    facts: CheckpointFacts, architecture: str, *, complete: bool = True
) -> Table | None:
    """Finds the tables of a multimodal model about images, to be laid over its text's family.

    Args:
        architecture: of the whole model.
        complete: whether the checkpoint has the tensors as well.

    Raises:
        SpecError: several match.
    """
    folder = specs_folder() / "vision"
    found = []
    for path in sorted(folder.glob("*.toml")):
        if _may_match(path, [architecture]):
            table = read_toml(path)
            match = {**table.get("match", {}), **({} if complete else {"when": "true"})}
            if _matching(match, path, facts, frozenset([architecture])):
                found.append((path, table))
    if len(found) > 1:
        names = ", ".join(path.stem for path, _ in found)
        raise SpecError(found[0][0], "match", f"several describe {architecture}: {names}")
    return _whole_layer(found[0][1], folder) if found else None


def _whole_layer(table: Table, folder: Path) -> Table:
    """A layer with those that it changes, whose names are their `family`."""
    own = {name: value for name, value in table.items() if name not in ("match", "family")}
    if "family" not in table:
        return own
    return merge(_whole_layer(read_toml(folder / f"{table['family']}.toml"), folder), own)


def find_family(facts: CheckpointFacts, architectures: Sequence[str], source: Path) -> Path:
    """The family of a checkpoint without a specification.

    Args:
        architectures: the checkpoint's names: `architectures` of config.json, or the default of its
            `model_type`; GGUF's `general.architecture`; none for llama2.c.

    Raises:
        SpecError: no family matches, or several do.
    """
    called = frozenset(alias for name in architectures for alias in _without_task(name))
    words = ["llama2c"] if facts.format == "llama2c" else called
    found = [
        path
        for path in families().values()
        if _may_match(path, words)
        and _matching(read_toml(path).get("match", {}), path, facts, called)
    ]
    if len(found) == 1:
        return found[0]
    names = ", ".join(name[:100] for name in architectures[:5])
    what = names or f"a {facts.format} file without an architecture"
    if not found:
        raise SpecError(
            source, "", f"no family is known for {what}; write a specification (jinfer docs specs)"
        )
    names = ", ".join(path.stem for path in found)
    raise SpecError(source, "", f"several families match {what}: {names}; name one in a spec")


def _matching(
    table: Any, path: Path, facts: CheckpointFacts, architectures: frozenset[str]
) -> bool:
    return matches(
        table,
        path,
        format=facts.format,
        architectures=architectures,
        lookup=facts.lookup,
        has=facts.has,
        rows=facts.row_count,
    )


def _without_task(architecture: str) -> Iterator[str]:
    """An architecture, and of a model that classifies texts those of its family."""
    yield architecture
    if architecture.endswith(CLASSIFIES):
        stem = architecture.removesuffix(CLASSIFIES)
        yield from (f"{stem}{task}" for task in ("Model", "ForCausalLM"))


def _may_match(path: Path, words: Iterable[str]) -> bool:
    """Whether a family's `[match]` contains one of these words.

    Parsing all families would slow down each start.
    """
    before, header, after = content_of(path).partition(b"[match]")
    table = after.partition(b"\n[")[0] if header else before
    return any(word.encode(errors="replace") in table for word in words)


def parse_override(text: str) -> Table:
    """Parses `key.of.table=value` to a table; the value is TOML, or else a string.

    Raises:
        SpecError: there is no "=", or no key before it.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SpecError("--set", text, "is not key=value, such as engine.context=4096")
    try:
        if _parts(value) > MAX_PARTS:
            raise ValueError("it is no number and no table")
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        parsed = value.strip()
    return nested(key.strip(), parsed)

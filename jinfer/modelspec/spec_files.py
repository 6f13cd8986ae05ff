"""Specification files: reading them, finding families, matching a family to a checkpoint."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from jinfer.guard.safe_files import FileRefused, is_there, read_regular
from jinfer.modelspec.family_match import matches
from jinfer.modelspec.resolve_spec import Facts
from jinfer.modelspec.spec_errors import SpecError, nearest, show
from jinfer.modelspec.toml_tables import Table, check_plain
from jinfer.modelspec.toml_tables import nested as nested

MAX_BYTES = 1 << 20  # of a specification; the longest that comes with jinfer has 10,000
# The parser takes time and memory with the square of the parts of a dotted key: of this, a quarter
# of a second and 15 MB.
MAX_PARTS = 2000**2
_FRACTION = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.])")


@cache
def specs_folder() -> Path:
    """The folder of the specifications that come with jinfer: installed with it, or beside it."""
    package = Path(__file__).parents[1]
    installed = package / "specs_data"
    return installed if installed.is_dir() else package.parent / "specs"


def read_toml(path: Path) -> Table:
    """Reads one TOML file. Raises `SpecError`."""
    return _parsed(path, _content(path))


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_BYTES)
    except FileRefused as error:
        raise SpecError(path, "", str(error)) from None


@lru_cache(maxsize=512)  # by what is in it: in a notebook, files are edited and read again
def _parsed(path: Path, content: bytes) -> Table:
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
        if _parts(text) > MAX_PARTS:
            raise SpecError(path, "", "has a line with too many dots")
        table = tomllib.loads(text)
    except SpecError:
        raise
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, numbers without end
        raise SpecError(path, "", f"is not TOML: {error}") from error
    check_plain(table, path)
    return table


def _parts(text: str) -> int:
    """The squares of the dots of each line, those of fractions left out."""
    return sum(line.count(".") ** 2 for line in _FRACTION.sub("", text).split("\n"))


def families() -> dict[str, Path]:
    """Every family that comes with jinfer, by name."""
    return {path.stem: path for path in sorted((specs_folder() / "families").glob("*.toml"))}


def with_families(table: Table, path: Path) -> list[Table]:
    """A specification's tables from the most general: its family's family, its family, itself."""
    tables, seen = [table], {path}
    while "family" in tables[0]:
        path = _family_file(tables[0]["family"], path)
        if path in seen:
            raise SpecError(path, "family", "the families name each other in a circle")
        seen.add(path)
        tables.insert(0, read_toml(path))
    return tables


def _family_file(name: Any, beside: Path) -> Path:
    known = families()
    if isinstance(name, str) and name in known:
        return known[name]
    if not isinstance(name, str) or not name.endswith(".toml"):
        raise SpecError(beside, "family", f"unknown family {show(name)}; {nearest(name, known)}")
    try:
        return (beside.parent / name).resolve()
    except (OSError, ValueError) as error:  # a circle of links, a null character
        raise SpecError(beside, "family", f"{show(name)} is no file: {error}") from error


def format_table(format: str) -> Table:
    """What holds for every checkpoint of a format (`specs/formats`)."""
    path = specs_folder() / "formats" / f"{format}.toml"
    return read_toml(path) if is_there(path) else {}


def architecture_of(model_type: str) -> str | None:
    """The architecture that goes without saying for a `model_type` of a config.json."""
    known = format_table("architectures").get(model_type)
    return known if isinstance(known, str) else None


def find_family(facts: Facts, architectures: Sequence[str], source: Path) -> Path:
    """The family that a checkpoint without a specification belongs to.

    Args:
        architectures: the names it gives itself: `architectures` of config.json, or what its
            `model_type` stands for; GGUF's `general.architecture`; none for llama2.c.

    Raises:
        SpecError: no family matches, or several do.
    """
    called = frozenset(architectures)
    words = ["llama2c"] if facts.format == "llama2c" else called
    found = [
        path
        for path in families().values()
        if _may_match(path, words)
        and matches(
            read_toml(path).get("match", {}),
            path,
            format=facts.format,
            architectures=called,
            lookup=facts.lookup,
            has=facts.has,
            rows=facts.rows,
        )
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


def _may_match(path: Path, words: Iterable[str]) -> bool:
    """Whether a family's `[match]` has one of these words.

    To parse all families takes a twentieth of a second, which each start would wait for.
    """
    before, header, after = _content(path).partition(b"[match]")
    table = after.partition(b"\n[")[0] if header else before
    return any(word.encode(errors="replace") in table for word in words)


def parse_override(text: str) -> Table:
    """`key.of.table=value` as a table; the value is TOML, or a text if it is not.

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

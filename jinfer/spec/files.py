"""Specification files: reading them, finding families, matching a family to a checkpoint."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinfer.spec.errors import SpecError, nearest
from jinfer.spec.resolve import Facts
from jinfer.spec.values import Missing, Values

Table = dict[str, Any]


@cache
def specs_folder() -> Path:
    """The folder of the specifications that come with jinfer: installed with it, or beside it."""
    package = Path(__file__).parents[1]
    installed = package / "specs_data"
    return installed if installed.is_dir() else package.parent / "specs"


@cache
def read_toml(path: Path) -> Table:
    """Reads one TOML file. Raises `SpecError`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(path, "", f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(path, "", f"is not TOML: {error}") from error


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
    if isinstance(name, str) and name.endswith(".toml"):
        return (beside.parent / name).resolve()
    known = families()
    if name not in known:
        raise SpecError(beside, "family", f"unknown family {name!r}; {nearest(str(name), known)}")
    return known[name]


def format_table(format: str) -> Table:
    """What holds for every checkpoint of a format (`specs/formats`)."""
    path = specs_folder() / "formats" / f"{format}.toml"
    return read_toml(path) if path.exists() else {}


def find_family(facts: Facts, architectures: Sequence[str], source: Path) -> Path:
    """The family that a checkpoint without a specification belongs to.

    Args:
        architectures: the names it gives itself: `architectures` of config.json, GGUF's
            `general.architecture`; none for llama2.c.

    Raises:
        SpecError: no family matches, or several do.
    """
    matches = [
        path
        for path in families().values()
        if _matches(read_toml(path).get("match", {}), facts, architectures, path)
    ]
    if len(matches) == 1:
        return matches[0]
    what = ", ".join(architectures) or f"a {facts.format} file without an architecture"
    if not matches:
        raise SpecError(
            source, "", f"no family is known for {what}; write a specification (docs/specs.md)"
        )
    names = ", ".join(path.stem for path in matches)
    raise SpecError(source, "", f"several families match {what}: {names}; name one in a spec")


def _matches(
    match: Mapping[str, Any], facts: Facts, architectures: Sequence[str], path: Path
) -> bool:
    for key in match:
        allowed = ("architectures", "gguf", "llama2c", "when")
        if key not in allowed:
            raise SpecError(path, f"match.{key}", f"unknown key; {nearest(key, allowed)}")
    if facts.format == "llama2c":
        return bool(match.get("llama2c", False))
    wanted = match.get("gguf" if facts.format == "gguf" else "architectures", [])
    if not set(wanted) & set(architectures):
        return False
    if "when" not in match or facts.format == "gguf":
        return True
    values = Values(path, {}, lambda key: _or_false(facts, key), facts.has, facts.source)
    return bool(values.value(match["when"], "match.when"))


def _or_false(facts: Facts, key: str) -> Any:
    """In a condition, a key that the checkpoint lacks counts as false."""
    try:
        return facts.lookup(key)
    except Missing:
        return False


def parse_override(text: str) -> Table:
    """`key.of.table=value` as a table; the value is TOML, or a text if it is not.

    Raises:
        SpecError: there is no "=".
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SpecError("--set", text, "is not key=value, such as engine.context=4096")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    return nested(key.strip(), parsed)


def nested(key: str, value: Any) -> Table:
    """`{"a": {"b": value}}` of the dotted key `a.b`."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value



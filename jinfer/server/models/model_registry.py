"""Model registry: the models of the command line, of a folder and of a file of models."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinfer.loader.config.source_errors import SourceError
from jinfer.loader.model_files import SPEC_FILE
from jinfer.loader.open_keywords import override_tables
from jinfer.modelspec.spec_errors import SpecError, show_value
from jinfer.modelspec.spec_files import read_toml
from jinfer.modelspec.toml_tables import check_keys, check_text, check_texts, merge
from jinfer.sandbox.safe_files import path_exists
from jinfer.server.http.server_settings import ModelSource

_KEYS = ("source", "overrides", "aliases", "pinned", "load_on_startup", "idle_unload")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_MARKS = ("config.json", "model.orbax")  # files of a checkpoint's folder other than weights
_OTHER_SHARD = re.compile(r".*-(?!0*1-of-)\d{1,6}-of-\d{1,6}\.gguf")
_FIRST_SHARD = re.compile(r"-0*1-of-\d{1,6}$")
_DEPTH = 2  # levels of folders: FOLDER/model, FOLDER/owner/model


@dataclass(frozen=True)
class ModelRegistry:
    """The sources of a server's models.

    Attributes:
        named: models of the command line.
        folder: each GGUF file, checkpoint and specification in it is a model.
        file: a TOML file with a table for each model: `_KEYS`.
        overrides: keys of the specifications of the models of `folder` and `file`.
    """

    named: tuple[ModelSource, ...] = ()
    folder: Path | None = None
    file: Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_fixed(self) -> bool:
        """Whether the models are always those of the command line."""
        return self.folder is None and self.file is None

    def sources(self) -> list[ModelSource]:
        """List the current models of the command line, of the file and of the folder.

        Raises:
            SourceError: the folder cannot be read.
            SpecError: an invalid key of the file, or a duplicate name.
        """
        found = {source.name: source for source in self.named}
        in_folder = {
            source.name: source for source in self._in_folder() if source.name not in found
        }
        for name, table in self._tables():
            if name in found:
                raise SpecError(self.file, name, "is a model of the command line, too; rename one")
            found[name] = self._model(name, table, in_folder.pop(name, None))
        found |= in_folder
        self._check_aliases(found)
        return list(found.values())

    def _tables(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        if self.file is None:
            return
        for name, table in read_toml(self.file).items():
            if not isinstance(table, Mapping):
                raise SpecError(self.file, name, "is not a table; write [name] and source = ...")
            if table and not table.keys() & set(_KEYS):
                hint = f'name with dots, write ["{name}.{next(iter(table))}"]'
                raise SpecError(self.file, name, f"has none of {', '.join(_KEYS)}; for a {hint}")
            yield name, check_keys(table, _KEYS, self.file, name)

    def _model(self, name: str, table: Mapping[str, Any], known: ModelSource | None) -> ModelSource:
        """Read a model of the file; `known` is the model with its name in the folder."""
        file = self.file
        assert file is not None, "the table is from it"
        if "source" in table:
            path = _beside(check_text(table["source"], file, f"{name}.source"), file.parent)
        elif known is not None:
            path = known.path
        else:
            hint = "" if self.folder is None else f", and {self.folder} has no such model"
            raise SpecError(file, f"{name}.source", f"is missing; write the model's source{hint}")
        own = table.get("overrides", {})
        if not isinstance(own, Mapping):
            raise SpecError(file, f"{name}.overrides", f"{show_value(own)} is not a table")
        try:
            overrides = merge(self.overrides, override_tables(own))
        except ValueError as error:  # RequestError and SpecError
            raise SpecError(file, f"{name}.overrides", str(error)) from None
        idle = table.get("idle_unload")
        if idle is not None and not (_is_number(idle) and 0 <= idle < math.inf):
            reason = f"{show_value(idle)} is not a number of seconds"
            raise SpecError(file, f"{name}.idle_unload", reason)
        pinned = _flag(table, "pinned", file, name)
        return ModelSource(
            name,
            path,
            overrides,
            aliases=check_texts(table.get("aliases", ()), file, f"{name}.aliases"),
            on_demand=not (pinned or _flag(table, "load_on_startup", file, name)),
            pinned=pinned,
            idle_unload=None if idle is None else float(idle),
        )

    def _check_aliases(self, found: Mapping[str, ModelSource]) -> None:
        seen = set(found)
        for item in found.values():
            for alias in item.aliases:
                if alias in seen:
                    reason = f"{show_value(alias)} is the name or an alias of another model"
                    raise SpecError(self.file, f"{item.name}.aliases", reason)
                seen.add(alias)

    def _in_folder(self) -> Iterator[ModelSource]:
        """Yield the models of the folder; a duplicate name gets its file's suffix."""
        if self.folder is None:
            return
        names = set[str]()
        for name, path in models_in(self.folder):
            if name in names:
                name += path.suffix
            if name not in names:
                names.add(name)
                yield ModelSource(name, str(path), self.overrides, on_demand=True)


def models_in(folder: Path) -> list[tuple[str, Path]]:
    """List the models in a folder as pairs of name and path.

    Models are specifications (.toml), GGUF files (the first of a split set), and folders with a
    checkpoint, also nested (`owner/name`). A GGUF file with the name of a specification is its
    weights. No file is opened.

    Raises:
        SourceError: the folder cannot be read.
    """
    try:
        return sorted(_models_in(folder, "", _DEPTH))
    except OSError as error:
        reason = error.strerror or error
        raise SourceError(f"--models-dir {folder}: cannot be read: {reason}") from None


def _models_in(folder: Path, prefix: str, depth: int) -> Iterator[tuple[str, Path]]:
    entries = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    specified = {entry.stem for entry in entries if entry.suffix == ".toml"}
    for path in entries:
        if path.is_dir():
            yield from _models_of(path, prefix + path.name, depth)
        elif path.suffix == ".toml":
            yield prefix + path.stem, path
        elif is_gguf_model(path.name) and path.stem not in specified:
            yield prefix + _FIRST_SHARD.sub("", path.stem), path


def _models_of(folder: Path, name: str, depth: int) -> Iterator[tuple[str, Path]]:
    """Yield the models of a folder: a checkpoint, GGUF files, or nested folders."""
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError:
        yield name, folder  # opening it reports the error
        return
    weights = sorted(name for name in names if is_gguf_model(name))
    marked = path_exists(folder / SPEC_FILE) or names & set(_MARKS)
    if marked or any(Path(name).suffix in _WEIGHTS for name in names):
        yield name, folder
    elif len(weights) == 1:
        yield name, folder / weights[0]
    elif depth > 1 or weights:
        yield from _models_in(folder, f"{name}/", depth - 1)


def is_gguf_model(name: str) -> bool:
    """Return whether a file is a GGUF model: neither a projector nor a later part of a set."""
    return (
        name.endswith(".gguf")
        and not name.startswith("mmproj")
        and not _OTHER_SHARD.fullmatch(name)
    )


def _beside(source: str, folder: Path) -> str:
    """Resolve a source of the file: a path relative to the file, or a name of `jinfer list`."""
    if "://" in source:
        return source
    path = folder / Path(source).expanduser()
    return str(path) if path_exists(path) else source


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flag(table: Mapping[str, Any], key: str, file: Path, name: str) -> bool:
    value = table.get(key, False)
    if not isinstance(value, bool):
        raise SpecError(file, f"{name}.{key}", f"{show_value(value)} is not true or false")
    return value

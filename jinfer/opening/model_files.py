"""Files of a model: its specification, and where that says its weights and tokenizer are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from jinfer.checkpoint import Checkpoint
from jinfer.modelspec.resolve_spec import STACKS
from jinfer.modelspec.spec_errors import SpecError, show_value
from jinfer.modelspec.spec_files import architecture_of, read_toml
from jinfer.modelspec.toml_tables import check_text
from jinfer.opening.multimodal import Multimodal
from jinfer.opening.sources import locate
from jinfer.sandbox.safe_files import path_exists

SPEC_FILE = "spec.toml"  # a folder that has one is that specification
_PLACES = ("weights", "tokenizer")


@dataclass(frozen=True)
class SpecFile:
    """What the user points at, and its tables if that is a specification.

    Attributes:
        path: a specification, or a checkpoint's folder or file.
        own: the tables of a specification; empty for bare weights.
        enclosed: the specification was found in a folder that the user named, which it must not
            lead out of.
        weights: the checkpoint's folder or file.
        trust: whether the user trusts its author; None: nothing says so.
    """

    path: Path
    own: Mapping[str, Any]
    enclosed: bool
    weights: Path
    trust: bool | None

    @property
    def describes_model(self) -> bool:
        """Whether the specification says how the model is built, or names a family."""
        return "family" in self.own or any(stack in self.own for stack in STACKS)


@dataclass(frozen=True)
class ModelFiles(SpecFile):
    """A source with its checkpoint opened; how the model is built is not known yet.

    Attributes:
        checkpoint: opened; no tensor has been read.
        config: config.json, or the metadata of a file that carries its own; of a multimodal
            model, what they say of its language model.
        multimodal: what such a model has besides.
    """

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    multimodal: Multimodal | None = None

    @property
    def architectures(self) -> list[str]:
        """The architectures that the checkpoint says it is of."""
        if self.checkpoint.format == "gguf":
            return [str(self.config.get("general.architecture", ""))]
        names, type_ = self.config.get("architectures"), self.config.get("model_type")
        names = [n for n in names if isinstance(n, str)] if isinstance(names, list) else []
        if not names and isinstance(type_, str):
            return [architecture_of(type_) or type_]
        return names


def read_spec_file(source: str, path: Path, overrides: Mapping[str, Any]) -> SpecFile:
    """Reads a specification, or the `spec.toml` of a folder, and finds its weights.

    Args:
        source: what the user points at, which is at `path`.
        overrides: tables laid over the specification.

    Raises:
        SpecError, SourceError: it names no weights, or what is not there.
    """
    enclosed = path.is_dir() and path_exists(path / SPEC_FILE)
    path = path / SPEC_FILE if enclosed else path
    own = read_toml(path) if path.suffix == ".toml" else {}
    if enclosed:
        check_enclosed(path, "family", own.get("family"))
        if isinstance(engine := own.get("engine"), Mapping):
            check_enclosed(path, "engine.cache_disk", engine.get("cache_disk"))
    weights = path
    if path.suffix == ".toml":
        named = _location("weights", path, own, overrides, enclosed)
        if named is None:
            reason = "is missing: which checkpoint? set it there or with --set weights=..."
            raise SpecError(path, "weights", reason)
        weights = named
    # A specification that came with the weights is not the user's word.
    trust = _is_trusted(source, path, {} if enclosed else own, overrides)
    if "family" in overrides:
        own = {**own, "family": overrides["family"]}
    return SpecFile(path, own, enclosed, weights, trust)


def tokenizer_path(files: ModelFiles, overrides: Mapping[str, Any]) -> Path:
    """The folder or file where the tokenizer is looked for: a GGUF file carries its own."""
    own = files.checkpoint.path if files.checkpoint.format == "gguf" else files.weights
    return _location("tokenizer", files.path, files.own, overrides, files.enclosed) or own


def _location(
    key: str, path: Path, own: Mapping[str, Any], overrides: Mapping[str, Any], enclosed: bool
) -> Path | None:
    """Where `key` leads, if it is given.

    A path in a specification is relative to its file, one given by the user to where the user is.

    Args:
        enclosed: one in the specification must stay in its folder.
    """
    table, beside = (overrides, Path.cwd()) if key in overrides else (own, path.parent)
    if enclosed and table is own:
        check_enclosed(path, key, own.get(key))
    return locate(check_text(table[key], path, key), beside) if key in table else None


def check_enclosed(path: Path, key: str, said: Any) -> None:
    """Raises `SpecError` if a path in a file that nobody named leads out of the file's folder.

    Links are followed: download caches are made of them.
    """
    text = str(said)
    if said is not None and (
        "://" in text or text[:1] in ("/", "~") or ".." in PurePath(text).parts or "\\" in text
    ):
        reason = (
            f"{show_value(said)} leads out of the folder; give {path.name} itself if that is right"
        )
        raise SpecError(path, key, reason)


def _is_trusted(
    source: str, path: Path, own: Mapping[str, Any], overrides: Mapping[str, Any]
) -> bool | None:
    """What the user says, or a specification of the user's; what a hub has is not trusted."""
    said = overrides.get("trust", own.get("trust"))
    if said is not None and not isinstance(said, bool):
        raise SpecError(path, "trust", f"{show_value(said)} is not true or false")
    places = (source, *(str(table.get(key)) for table in (own, overrides) for key in _PLACES))
    return False if said is None and any(p.startswith("hf://") for p in places) else said

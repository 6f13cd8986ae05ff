"""From what a user points at to a specification and an open checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

from jinfer.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from jinfer.checkpoint.block_scaled import decode_scaled, read_block
from jinfer.checkpoint.native_checkpoint import ConvertedCheckpoint
from jinfer.guard.download_check import read_downloaded
from jinfer.guard.safe_files import FileRefused, is_there
from jinfer.modelspec.config_lookup import lookup_in
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.resolve_spec import STACKS, Facts, resolve
from jinfer.modelspec.spec_errors import SpecError, show
from jinfer.modelspec.spec_files import (
    architecture_of,
    find_family,
    format_table,
    read_toml,
    with_families,
)
from jinfer.modelspec.spec_values import Missing, rows_in
from jinfer.modelspec.toml_tables import check_text
from jinfer.opening.resolve_name import in_full
from jinfer.opening.sources import SourceError, locate
from jinfer.opening.unused_config import consequences, unread
from jinfer.weights.infer_from_tensors import heads_left_out, settle

MAX_CONFIG_BYTES = 64 << 20
_PLACES = ("weights", "tokenizer")
_MAX_SHARED_LAYERS = 64
SPEC_FILE = "spec.toml"  # a folder that has one is that specification


@dataclass(frozen=True)
class Recognized:
    """A model found.

    Attributes:
        spec: how it is built.
        checkpoint: its weights, not yet loaded.
        config: config.json, or the metadata of a file that carries its own.
        tokenizer: the folder or file where its tokenizer is looked for.
        unread: the keys of `config` that nothing looked up, with their values.
        trust: of its tokenizer; see `load_tokenizer`.
    """

    spec: ModelSpec
    checkpoint: Checkpoint
    config: Mapping[str, Any]
    tokenizer: Path
    unread: Mapping[str, Any]
    trust: bool | None = None


@dataclass(frozen=True)
class Located:
    """A source with its checkpoint opened, before it is known how the model is built.

    Attributes:
        path: what the user points at.
        own: the tables of a specification; empty for bare weights.
        weights: the checkpoint's folder or file.
        checkpoint, config: as in `Recognized`.
        trust: whether the user trusts who made it; None: nobody says.
        enclosed: the specification was found in a folder that the user named, which it must not
            lead out of.
    """

    path: Path
    own: Mapping[str, Any]
    weights: Path
    checkpoint: Checkpoint
    config: Mapping[str, Any]
    trust: bool | None = None
    enclosed: bool = False

    @property
    def architectures(self) -> list[str]:
        """What the checkpoint calls itself."""
        return _architectures(self.checkpoint, self.config)

    @property
    def describes_model(self) -> bool:
        """Whether the specification says how the model is built, or names who does."""
        return "family" in self.own or any(stack in self.own for stack in STACKS)

    def family(self) -> str:
        """The family that matches the checkpoint. Raises `SpecError` if none does, or several."""
        facts = _facts(self.checkpoint, self.config, self.weights)
        return str(find_family(facts, self.architectures, self.path))

    def spec(self, overrides: Mapping[str, Any]) -> ModelSpec:
        """How the model is built. Raises `SpecError`, `CheckpointError`."""
        return self.resolved(overrides)[0]

    def resolved(self, overrides: Mapping[str, Any]) -> tuple[ModelSpec, dict[str, Any]]:
        """How the model is built, and the keys of `config` that nothing looked up; as `spec`.

        What a specification or the user replaces in a family is looked up by their choice.
        """
        own = self.own if self.describes_model else {**self.own, "family": self.family()}
        families = with_families(dict(own), self.path)
        # A family that was found is one of jinfer's own.
        for table in families if self.enclosed and self.describes_model else ():
            check_enclosed(self.path, "family", table.get("family"))
        tables = [*families, overrides]
        asked = set[str]()
        facts = _facts(self.checkpoint, self.config, self.weights, asked)
        base = format_table(self.checkpoint.format)
        spec = resolve(tables, str(self.path), facts, base)
        if absent := heads_left_out(spec, self.checkpoint):
            tables.append({"modules": {name: {"when": False} for name in absent}})
            spec = resolve(tables, str(self.path), facts, base)
        self._check_layers(spec)
        left = unread(self.config, asked)
        if consequences(left, self.config, spec):
            for replaced in filter(None, (families[:-1], families)):
                with suppress(SpecError):  # it may need what is laid over it
                    resolve(replaced, str(self.path), facts, base)
            left = unread(self.config, asked)
        return settle(spec, self.checkpoint), left

    def _check_layers(self, spec: ModelSpec) -> None:
        """Refuses layers that the file cannot have, before they take time and memory.

        A layer has a tensor of its own, but for models whose layers share theirs.
        """
        layers = sum(len(stack.layers) for stack in spec.stacks)
        if layers > max(_MAX_SHARED_LAYERS, len(self.checkpoint.tensors)):
            reason = f"is {layers} in all, but {self.checkpoint.path.name} has only "
            raise SpecError(
                self.path, "dims.layers", f"{reason}{len(self.checkpoint.tensors)} tensors"
            )

    def tokenizer(self, overrides: Mapping[str, Any]) -> Path:
        """The folder or file where the tokenizer is looked for: a GGUF file carries its own."""
        own = self.checkpoint.path if self.checkpoint.format == "gguf" else self.weights
        return _location("tokenizer", self.own, overrides, self.path, self.enclosed) or own


def open_source(source: str | Path, overrides: Mapping[str, Any]) -> Located:
    """Opens what a user points at, without asking whether any family fits it.

    Raises:
        SourceError, SpecError, CheckpointError: one line with the file and what to do.
    """
    if not isinstance(source, str | Path) or not str(source).strip():
        raise SourceError(
            f"{source!r} is no model; give a path, a name of jinfer list, or owner/name of a hub"
        )
    source = in_full(str(source), Path.cwd())
    path = locate(source, Path.cwd())
    enclosed = path.is_dir() and is_there(path / SPEC_FILE)
    if enclosed:
        path = path / SPEC_FILE
    own = read_toml(path) if path.suffix == ".toml" else {}
    if enclosed:
        check_enclosed(path, "family", own.get("family"))
    if path.suffix != ".toml":
        weights = path
    elif (named := _location("weights", own, overrides, path, enclosed)) is not None:
        weights = named
    else:
        raise SpecError(
            path, "weights", "is missing: which checkpoint? set it there or with --set weights=..."
        )
    checkpoint = open_checkpoint(weights)
    if "family" in overrides:
        own = {**own, "family": overrides["family"]}
    config = _config(weights, checkpoint)
    if not isinstance(checkpoint, ConvertedCheckpoint):
        checkpoint = decode_scaled(checkpoint, read_block(config, _config_path(weights)))
    trust = _trust(source, {} if enclosed else own, overrides, path)
    return Located(path, own, weights, checkpoint, config, trust, enclosed)


def recognize(source: str | Path, overrides: Mapping[str, Any]) -> Recognized:
    """Opens a specification with its weights, or weights whose family is found by their words.

    Args:
        source: a specification (.toml), or anything `sources.locate` understands.
        overrides: tables laid over the specification.

    Raises:
        SourceError, SpecError, CheckpointError: one line with the file and what to do.
    """
    opened = open_source(source, overrides)
    spec, left = opened.resolved(overrides)
    tokenizer = opened.tokenizer(overrides)
    return Recognized(spec, opened.checkpoint, opened.config, tokenizer, left, opened.trust)


def _location(
    key: str, own: Mapping[str, Any], overrides: Mapping[str, Any], path: Path, enclosed: bool
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
        reason = f"{show(said)} leads out of the folder; give {path.name} itself if that is right"
        raise SpecError(path, key, reason)


def _trust(
    source: str, own: Mapping[str, Any], overrides: Mapping[str, Any], path: Path
) -> bool | None:
    """What the user says, or a specification that he named; what a hub has is not trusted."""
    said = overrides.get("trust", own.get("trust"))
    if said is not None and not isinstance(said, bool):
        raise SpecError(path, "trust", f"{show(said)} is not true or false")
    places = (source, *(str(table.get(key)) for table in (own, overrides) for key in _PLACES))
    return False if said is None and any(p.startswith("hf://") for p in places) else said


def _config(weights: Path, checkpoint: Checkpoint) -> Mapping[str, Any]:
    if checkpoint.format in ("gguf", "llama2c"):
        return checkpoint.metadata
    path = _config_path(weights)
    return language_model(read_json(path)) if is_there(path) else {}


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json as its language model's.

    What is for text alone stands in a table of its own, `text_config`, where a model also sees
    images; there it counts before the rest, and what it leaves out is looked up in the rest.
    """
    own = config.get("text_config")
    if not isinstance(own, dict):
        return config
    given = {key: value for key, value in own.items() if value is not None}
    return config | given | {key: config.get(key) for key in ("architectures", "model_type")}


def _config_path(weights: Path) -> Path:
    return (weights if weights.is_dir() else weights.parent) / "config.json"


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises `SourceError`."""
    table = read_json_value(path)
    if not isinstance(table, dict):
        raise SourceError(f"{path}: is not a JSON object")
    return table


def read_json_value(path: Path) -> Any:
    """Reads a JSON file. Raises `SourceError`."""
    try:
        return json.loads(read_downloaded(path, MAX_CONFIG_BYTES).decode("utf-8-sig"))
    except FileRefused as error:
        raise SourceError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: cannot be read as JSON: {error}"[:300]) from None


def _facts(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    weights: Path,
    asked: set[str] | None = None,
) -> Facts:
    """What a checkpoint says of itself; the keys that are looked up go to `asked`."""
    asked = set() if asked is None else asked
    names = checkpoint.tensors
    rows = rows_in({name: tensor.shape for name, tensor in names.items()})

    def has(pattern: str) -> bool:
        return pattern in names or any(fnmatchcase(name, pattern) for name in names)

    if checkpoint.format != "gguf":
        source = "config.json" if checkpoint.format != "llama2c" else weights.name
        return Facts(checkpoint.format, lookup_in(config, asked), has, source, rows)
    architecture = config.get("general.architecture", "")

    def lookup(key: str) -> Any:
        for full in (f"{architecture}.{key}", key):
            if config.get(full) is not None:
                asked.add(full)
                return config[full]
        raise Missing(key)

    return Facts("gguf", lookup, has, weights.name, rows)


def _architectures(checkpoint: Checkpoint, config: Mapping[str, Any]) -> list[str]:
    if checkpoint.format == "gguf":
        return [str(config.get("general.architecture", ""))]
    names, type_ = config.get("architectures"), config.get("model_type")
    names = [each for each in names if isinstance(each, str)] if isinstance(names, list) else []
    if not names and isinstance(type_, str):
        return [architecture_of(type_) or type_]
    return names


__all__ = ["CheckpointError", "Located", "Recognized", "open_source", "read_json", "recognize"]

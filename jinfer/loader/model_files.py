"""Files of a model: its specification, checkpoint, tokenizer and adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from jinfer.loader.checkpoint import Checkpoint
from jinfer.loader.checkpoint.native_checkpoint import NativeCheckpoint
from jinfer.loader.checkpoint.open import MMPROJ
from jinfer.loader.config.config_json import Multimodal
from jinfer.loader.sources import PLACES, locate, names_in
from jinfer.modelspec.resolve_spec import STACKS
from jinfer.modelspec.spec_errors import SpecError, show_value
from jinfer.modelspec.spec_files import architecture_of, read_toml
from jinfer.modelspec.toml_tables import check_text
from jinfer.sandbox.safe_files import path_exists

if TYPE_CHECKING:
    from jinfer.modelspec.model_spec import AdapterSpec, ModelSpec
    from jinfer.modelspec.tensor_names import TensorMap
    from jinfer.nn.abstract_model import AbstractModel

SPEC_FILE = "spec.toml"  # a folder with this file is opened by that specification


@dataclass(frozen=True)
class SpecFile:
    """A specification, or weights without a specification.

    Attributes:
        path: the specification, or the checkpoint's folder or file.
        own: the tables of the specification; empty for weights without one.
        enclosed: the specification is the spec.toml of a folder that the user named, and its paths
            must stay in that folder.
        weights: the checkpoint's folder or file.
        trust: whether the user trusts the author of the files; None: not specified.
    """

    path: Path
    own: Mapping[str, Any]
    enclosed: bool
    weights: Path
    trust: bool | None

    @property
    def describes_model(self) -> bool:
        """Whether the specification defines the architecture or names a family."""
        return "family" in self.own or any(stack in self.own for stack in STACKS)


@dataclass(frozen=True)
class ModelFiles(SpecFile):
    """A specification with its checkpoint opened; the architecture is not resolved yet.

    Attributes:
        checkpoint: opened; no tensor has been read.
        config: config.json, or the metadata of a file without one; of a multimodal model, the
            configuration of its language model.
        multimodal: the other parts of a multimodal model.
        mmproj: a file of its encoder of images, whose metadata are in `config` as well.
    """

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    multimodal: Multimodal | None = None
    mmproj: Checkpoint | None = None

    @property
    def whole(self) -> str | None:
        """The architecture of a model that may read images: of GGUF, its kind of projector."""
        if self.multimodal is not None:
            return self.multimodal.architecture
        keys = ("clip.vision.projector_type", "clip.projector_type")
        return next((str(self.config[key]) for key in keys if key in self.config), None)

    @property
    def architectures(self) -> list[str]:
        """The architectures that the checkpoint names."""
        if self.checkpoint.format == "gguf":
            return [str(self.config.get("general.architecture", ""))]
        names, type_ = self.config.get("architectures"), self.config.get("model_type")
        names = [n for n in names if isinstance(n, str)] if isinstance(names, list) else []
        if not names and isinstance(type_, str):
            return [architecture_of(type_) or type_]
        return names


def read_spec_file(source: str, path: Path, overrides: Mapping[str, Any]) -> SpecFile:
    """Read a specification, or the `spec.toml` of a folder, and find its weights.

    Args:
        source: the user's source, which is located at `path`.
        overrides: tables that take precedence over the specification.

    Raises:
        SpecError, SourceError: it names no weights, or weights that do not exist.
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
        found = _location("weights", path, own, overrides, enclosed)
        if found is None:
            reason = "is missing: which checkpoint? set it there or with --set weights=..."
            raise SpecError(path, "weights", reason)
        weights = found
    # A specification from the same folder as the weights does not speak for the user.
    tables = (overrides,) if enclosed else (overrides, own)
    trust = next((table["trust"] for table in tables if "trust" in table), None)
    if trust is not None and not isinstance(trust, bool):
        raise SpecError(path, "trust", f"{show_value(trust)} is not true or false")
    sources = (source, *(str(table.get(key)) for table in tables for key in PLACES))
    if trust is None and any(place.startswith("hf://") for place in sources):
        trust = False  # files of a hub
    if "family" in overrides:
        own = {**own, "family": overrides["family"]}
    return SpecFile(path, own, enclosed, weights, trust)


def mmproj_path(
    files: SpecFile, checkpoint: Checkpoint, overrides: Mapping[str, Any]
) -> Path | None:
    """Return llama.cpp's file of an encoder of images; None if there is none.

    It is named by `mmproj`, or the only one in the folder of a GGUF file.
    """
    named = _location("mmproj", files.path, files.own, overrides, files.enclosed)
    if named is not None or checkpoint.format != "gguf":
        return named
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    found = [name for name in names_in(folder) if fnmatch(name.lower(), MMPROJ)]
    return folder / found[0] if len(found) == 1 else None


def tokenizer_path(files: ModelFiles, overrides: Mapping[str, Any]) -> Path:
    """Return the folder or file of the tokenizer; a GGUF file contains its own."""
    own = files.checkpoint.path if files.checkpoint.format == "gguf" else files.weights
    return _location("tokenizer", files.path, files.own, overrides, files.enclosed) or own


def _location(
    key: str, path: Path, own: Mapping[str, Any], overrides: Mapping[str, Any], enclosed: bool
) -> Path | None:
    """Return the file or folder that `key` of a specification names; None if there is no such key.

    A path in a specification starts from its file; one that the user sets, from the current folder.
    """
    table, base = (overrides, Path.cwd()) if key in overrides else (own, path.parent)
    if enclosed and table is own:
        check_enclosed(path, key, own.get(key))
    return locate(check_text(table[key], path, key), base) if key in table else None


def check_enclosed(path: Path, key: str, value: Any) -> None:
    """Raise `SpecError` if a path in a file that the user did not name leads out of its folder.

    Links are followed, because download caches consist of links.
    """
    text = str(value)
    if value is not None and (
        "://" in text or text[:1] in ("/", "~") or ".." in PurePath(text).parts or "\\" in text
    ):
        reason = (
            f"{show_value(value)} leads out of the folder; give {path.name} itself if that is right"
        )
        raise SpecError(path, key, reason)


@dataclass(frozen=True)
class AdapterFile:
    """A LoRA adapter that is loaded with a model.

    Attributes:
        spec: its entry in the specification.
        path: its folder or file.
    """

    spec: AdapterSpec
    path: Path


def adapter_files(
    spec: ModelSpec, files: ModelFiles, overrides: Mapping[str, Any]
) -> tuple[AdapterFile, ...]:
    """Find the adapters of a specification.

    A path in a specification starts from its file; one that the user sets, from the current folder.

    Raises:
        SourceError, SpecError: an adapter does not exist.
    """
    found, own = [], files.path if files.path.is_dir() else files.path.parent
    for adapter in spec.adapters:
        base = Path.cwd() if adapter.name in overrides.get("adapters", {}) else own
        if files.enclosed and base is own:
            check_enclosed(files.path, f"adapters.{adapter.name}", adapter.source)
        found.append(AdapterFile(adapter, locate(adapter.source, base)))
    return tuple(found)


def with_own_heads(
    spec: ModelSpec, checkpoint: Checkpoint, adapters: Iterable[AdapterFile]
) -> tuple[ModelSpec, Checkpoint]:
    """Untie the model's head if an adapter that is merged changes the head.

    Raises:
        CheckpointError: an adapter is damaged.
    """
    for adapter in adapters if not isinstance(checkpoint, NativeCheckpoint) else ():
        if adapter.spec.merge:
            # Imported here, because most models have no adapters.
            from jinfer.loader.adapters.lora_adapter import open_adapter
            from jinfer.loader.adapters.merged_adapter import with_own_head

            spec, checkpoint = with_own_head(spec, checkpoint, open_adapter(adapter.path))
    return spec, checkpoint


def merged_checkpoint(
    checkpoint: Checkpoint,
    adapters: Iterable[AdapterFile],
    model: AbstractModel,
    tensors: TensorMap,
) -> Checkpoint:
    """Add the adapters with `merge = true` to the tensors of a checkpoint.

    Raises:
        CheckpointError, LoadError: an adapter is damaged, or belongs to another model.
    """
    for adapter in adapters:
        if adapter.spec.merge:
            from jinfer.loader.adapters.lora_adapter import open_adapter
            from jinfer.loader.adapters.merged_adapter import merged

            checkpoint = merged(checkpoint, open_adapter(adapter.path), model, tensors)
    return checkpoint

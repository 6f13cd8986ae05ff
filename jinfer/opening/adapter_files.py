"""Adapter files: where the LoRA adapters are that a specification names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinfer.checkpoint import Checkpoint
from jinfer.checkpoint.native_checkpoint import NativeCheckpoint
from jinfer.modelspec.model_spec import AdapterSpec, ModelSpec
from jinfer.modelspec.tensor_names import TensorMap
from jinfer.nn.abstract_model import AbstractModel
from jinfer.opening.model_files import ModelFiles, check_enclosed
from jinfer.opening.sources import locate


@dataclass(frozen=True)
class AdapterFile:
    """A LoRA adapter that is loaded with a model, and where it is."""

    spec: AdapterSpec
    path: Path


def adapter_files(
    spec: ModelSpec, files: ModelFiles, overrides: Mapping[str, Any]
) -> tuple[AdapterFile, ...]:
    """The adapters of a specification. Paths are relative to its file, the user's to the user.

    Raises:
        SourceError, SpecError: there is nothing there.
    """
    found, asked = [], overrides.get("adapters", {})
    for each in spec.adapters:
        if each.name in asked:
            beside = Path.cwd()
        else:
            beside = files.path if files.path.is_dir() else files.path.parent
            if files.enclosed:
                check_enclosed(files.path, f"adapters.{each.name}", each.source)
        found.append(AdapterFile(each, locate(each.source, beside)))
    return tuple(found)


def with_own_heads(
    spec: ModelSpec, checkpoint: Checkpoint, adapters: Iterable[AdapterFile]
) -> tuple[ModelSpec, Checkpoint]:
    """The model with a head that is not tied, if an adapter that is merged changes the head.

    Raises:
        CheckpointError: an adapter is damaged.
    """
    for each in adapters if not isinstance(checkpoint, NativeCheckpoint) else ():
        if each.spec.merge:
            from jinfer.weights.lora_adapter import open_adapter
            from jinfer.weights.merged_adapter import with_own_head

            spec, checkpoint = with_own_head(spec, checkpoint, open_adapter(each.path))
    return spec, checkpoint


def merged_checkpoint(
    checkpoint: Checkpoint,
    adapters: Iterable[AdapterFile],
    model: AbstractModel,
    tensors: TensorMap,
) -> Checkpoint:
    """The checkpoint with those of a specification's adapters in its tensors that it merges.

    Raises:
        CheckpointError, LoadError: an adapter is damaged, or of another model.
    """
    for each in adapters:
        if each.spec.merge:
            # Imported here, because most models have none.
            from jinfer.weights.lora_adapter import open_adapter
            from jinfer.weights.merged_adapter import merged

            checkpoint = merged(checkpoint, open_adapter(each.path), model, tensors)
    return checkpoint

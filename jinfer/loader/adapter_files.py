"""Adapter files: the LoRA adapters that a specification names, and the files that they lead to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinfer.loader.checkpoint import Checkpoint
from jinfer.loader.checkpoint.native_checkpoint import NativeCheckpoint
from jinfer.loader.model_files import ModelFiles, check_enclosed
from jinfer.loader.sources import locate
from jinfer.modelspec.adapters_table import AdapterSpec
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.tensor_names import TensorMap
from jinfer.nn.abstract_model import AbstractModel


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

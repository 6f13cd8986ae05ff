"""Adapter files: where the LoRA adapters are that a specification names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinfer.modelspec.adapters_table import AdapterSpec
from jinfer.modelspec.model_spec import ModelSpec
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

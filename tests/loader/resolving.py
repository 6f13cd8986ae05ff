"""What tests of opening share: a model resolved, before anything is made of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinfer.loader.checkpoint import Checkpoint
from jinfer.loader.model_files import tokenizer_path
from jinfer.loader.open_model import open_files
from jinfer.loader.resolve_model import resolve_model
from jinfer.modelspec.model_spec import ModelSpec


@dataclass(frozen=True)
class Resolved:
    """A model as `open_model` resolves it."""

    spec: ModelSpec
    unread: Mapping[str, Any]
    checkpoint: Checkpoint
    config: Mapping[str, Any]
    trust: bool | None


def resolved(source: Any, overrides: Mapping[str, Any]) -> Resolved:
    """The first steps of `open_model`, with tables laid over the specification."""
    files = open_files(source, overrides)
    spec, unread = resolve_model(files, overrides)
    assert isinstance(tokenizer_path(files, overrides), Path)
    return Resolved(spec, unread, files.checkpoint, files.config, files.trust)

"""What tests of opening share: a model resolved, before anything is made of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinfer.checkpoint import Checkpoint
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.opening.model_files import tokenizer_path
from jinfer.opening.open_model import open_files
from jinfer.opening.resolve_model import resolve_model


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

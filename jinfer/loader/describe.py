"""Description of a model in a few words: its name, family, and the format of its weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from jinfer.loader.hub import repository
from jinfer.loader.open_model import Opened
from jinfer.modelspec.spec_files import read_toml


def title(opened: Opened) -> str:
    """A model's name: its repository's, its specification's or its file's."""
    path = Path(opened.spec.path)
    return repository(path) or (path.stem if path.suffix == ".toml" else path.name)


def family(opened: Opened) -> str:
    """Where the specification, or a GGUF file, says it."""
    path, named = Path(opened.spec.path), None
    if path.suffix == ".toml":
        named = read_toml(path).get("family")
    return str(named or opened.checkpoint.metadata.get("general.architecture", ""))


def stored_as(opened: Opened) -> str:
    """How weights are kept: as asked, else as most of the file is."""
    asked, sizes = opened.spec.quantization.weights, Counter[str]()
    for tensor in opened.checkpoint.tensors.values():
        sizes[tensor.type.lower()] += tensor.nbytes
    return asked if asked.startswith("q") else next((t for t, _ in sizes.most_common(1)), asked)

"""A small model, its parts easy to change, and what every error has to be."""

import copy
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from jinfer.loader.resolve_model import without_infinity
from jinfer.modelspec.config_lookup import item_of_list, lookup_in
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.resolve_spec import CheckpointFacts, resolve
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import format_table, with_families
from jinfer.modelspec.spec_values import SpecValues, row_counter
from jinfer.modelspec.toml_tables import merge, nested

PATH = "made-up.toml"

MODEL = """
[dims]
vocab = 64
hidden = 32
layers = 2
heads = 4
kv_heads = 2
head_dim = "hidden / heads"
context = 128

[modules]
embed = { kind = "embedding" }
logits = { kind = "head" }

[decoder]
stem = "embed(tokens)"
layer = "x + attn(norm(x))"
head = "logits(norm(x))"

[decoder.modules]
norm = { kind = "rms" }
attn = { kind = "attention", position = { kind = "rope" } }
"""


def facts(
    config: Mapping[str, Any] | None = None,
    tensors: tuple[str, ...] | Mapping[str, tuple[int, ...]] = (),
) -> CheckpointFacts:
    """A checkpoint of safetensors whose config.json is `config`; `tensors` may have shapes."""

    def has(pattern: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in tensors)

    rows = row_counter(tensors if isinstance(tensors, Mapping) else {})
    return CheckpointFacts("safetensors", lookup_in(config or {}), has, "config.json", rows)


def gguf_facts(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...] | None]
) -> CheckpointFacts:
    """A GGUF file, as its metadata's keys are seen: without the architecture's name."""
    prefix = metadata["general.architecture"] + "."
    known = {key.removeprefix(prefix): value for key, value in metadata.items()}

    def lookup(key: str) -> Any:
        return without_infinity(known[key]) if key in known else item_of_list(lookup, key)

    def has(pattern: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in tensors)

    rows = row_counter({name: shape for name, shape in tensors.items() if shape is not None})
    return CheckpointFacts("gguf", lookup, has, "the GGUF metadata", rows)


def values(
    dims: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    tensors: tuple[str, ...] | Mapping[str, tuple[int, ...]] = (),
) -> SpecValues:
    """What evaluates values, over these dimensions, config.json and tensors."""
    known = facts(config, tensors)
    return SpecValues(PATH, dims or {}, known.lookup, known.has, known.source, known.row_count)


def model(text: str = MODEL, **changes: Any) -> dict[str, Any]:
    """The tables of a small model; `changes` are laid over it, dots written as two underscores."""
    table = copy.deepcopy(tomllib.loads(text))
    for key, value in changes.items():
        table = merge(table, nested(key.replace("__", "."), value))
    return table


def resolved(table: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> ModelSpec:
    """A specification without a family, resolved."""
    return resolve([table], PATH, facts(config), {})


def resolved_family(
    name: str, known: CheckpointFacts, over: Mapping[str, Any] | None = None
) -> ModelSpec:
    """A family that comes with jinfer, resolved for a checkpoint."""
    tables = with_families({"family": name, **(over or {})}, Path(PATH))
    return resolve(tables, PATH, known, format_table(known.format))


def error_of(table: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> str:
    """The error that a specification gives, checked to be one line that begins with the file."""
    with pytest.raises(SpecError) as caught:
        resolved(table, config)
    return one_line(caught.value)


def one_line(error: SpecError, path: object = PATH) -> str:
    """An error's text without the file's name."""
    text = str(error)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert len(text) < 1200
    return text.removeprefix(f"{path}: ")

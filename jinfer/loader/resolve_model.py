"""Resolving a model: from a specification or family, and a checkpoint's config, to a ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any

from jinfer.loader.config.unused_config import consequences, unread
from jinfer.loader.model_files import ModelFiles, check_enclosed
from jinfer.loader.weights.infer_from_tensors import infer_from_tensors, missing_heads
from jinfer.modelspec.config_lookup import lookup_in
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.resolve_spec import CheckpointFacts, resolve
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import CLASSIFIES, find_family, format_table, with_families
from jinfer.modelspec.spec_values import MissingKey, row_counter

RANK = 4  # llama.cpp's pooling type of models that score pairs of texts


def resolve_model(
    files: ModelFiles, overrides: Mapping[str, Any]
) -> tuple[ModelSpec, dict[str, Any]]:
    """How a model is built, and the keys of its config.json that nothing looked up, with values.

    What a specification or the user replaces in a family was looked up by their choice.

    Args:
        overrides: tables laid over the specification.

    Raises:
        SpecError, CheckpointError: one line with the file and what to do.
    """
    looked_up = set[str]()
    facts, families = _facts(files, looked_up), _families(files)
    tables, base = [*families, overrides], format_table(files.checkpoint.format)
    if files.multimodal is not None:
        base = {**base, "tensors": files.multimodal.tensors}
    if _classifies(files, facts, families):
        tables.insert(1, format_table("classifier"))
    spec = resolve(tables, str(files.path), facts, base)
    if absent := missing_heads(spec, files.checkpoint):
        tables.append({"modules": {name: {"when": False} for name in absent}})
        spec = resolve(tables, str(files.path), facts, base)
    spec = infer_from_tensors(spec, files.checkpoint)
    unused = unread(files.config, looked_up)
    if consequences(unused, files.config, spec):
        for replaced in filter(None, (families[:-1], families)):
            with suppress(SpecError):  # it may need what is laid over it
                resolve(replaced, str(files.path), facts, base)
        unused = unread(files.config, looked_up)
    return spec, unused


def family_of(files: ModelFiles) -> str:
    """The family that matches a checkpoint. Raises `SpecError` if none does, or several."""
    return str(find_family(_facts(files, set()), files.architectures, files.path))


def _families(files: ModelFiles) -> list[Mapping[str, Any]]:
    """The specification's tables from the most general, or those of the family that matches."""
    if not files.describes_model:  # a family that is found is one of jinfer's own
        return [*with_families({**files.own, "family": family_of(files)}, files.path)]
    tables = with_families(dict(files.own), files.path)
    for table in tables if files.enclosed else ():
        check_enclosed(files.path, "family", table.get("family"))
    return [*tables]


def _classifies(
    files: ModelFiles, facts: CheckpointFacts, families: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether it is a decoder with a head for classes, of which its family says nothing."""
    if any("encoder" in table or "classes" in table.get("decoder", {}) for table in families):
        return False
    if files.checkpoint.format == "gguf":
        key = f"{files.config.get('general.architecture', '')}.pooling_type"
        return files.config.get(key) == RANK and facts.has("cls.output.weight")
    return any(name.endswith(CLASSIFIES) for name in files.architectures)


def _facts(files: ModelFiles, looked_up: set[str]) -> CheckpointFacts:
    """What a checkpoint says of itself; the keys that are looked up go to `looked_up`."""
    checkpoint, config = files.checkpoint, files.config
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    for prefix, usual in files.multimodal.prefixes.items() if files.multimodal else ():
        own = {n: shape for n, shape in shapes.items() if n.startswith(prefix)}
        shapes |= {usual + name.removeprefix(prefix): shape for name, shape in own.items()}
    rows = row_counter(shapes)

    def has(pattern: str) -> bool:
        return pattern in shapes or any(fnmatchcase(name, pattern) for name in shapes)

    if checkpoint.format != "gguf":
        source = "config.json" if checkpoint.format != "llama2c" else files.weights.name
        return CheckpointFacts(checkpoint.format, lookup_in(config, looked_up), has, source, rows)
    architecture = config.get("general.architecture", "")

    def lookup(key: str) -> Any:
        for full in (f"{architecture}.{key}", key):
            if config.get(full) is not None:
                looked_up.add(full)
                return without_infinity(config[full])
        raise MissingKey(key)

    return CheckpointFacts("gguf", lookup, has, files.weights.name, rows)


def without_infinity(value: Any) -> Any:
    """A value of GGUF's metadata; in a list, a layer that has no number has none."""
    if not isinstance(value, list):
        return value
    return [None if isinstance(each, float) and not isfinite(each) else each for each in value]

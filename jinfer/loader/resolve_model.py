"""Resolving a model: a specification or a family, and a checkpoint, become a ModelSpec.

A specification describes all checkpoints of a family. The tensors of a checkpoint decide whether
its head is tied, and whether its positions are learned or sinusoids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any

import numpy as np

from jinfer.loader.checkpoint import Checkpoint, Tensor
from jinfer.loader.checkpoint.native_checkpoint import NativeCheckpoint
from jinfer.loader.config.classification_config import RANK
from jinfer.loader.config.unused_config import consequences, unread
from jinfer.loader.model_files import ModelFiles, check_enclosed
from jinfer.loader.weights.tensor_mapping import PIECE, by_name, row_reader, same_values
from jinfer.modelspec.block import Block
from jinfer.modelspec.blocks import HeadSpec
from jinfer.modelspec.config_lookup import item_of_list, lookup_in
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.position_blocks import LearnedPositionsSpec, SinusoidalPositionsSpec
from jinfer.modelspec.resolve_spec import VISION, CheckpointFacts, resolve
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import (
    CLASSIFIES,
    find_family,
    format_table,
    image_layer,
    with_families,
)
from jinfer.modelspec.spec_values import row_counter
from jinfer.modelspec.tensor_names import TensorMap


def resolve_model(
    files: ModelFiles, overrides: Mapping[str, Any]
) -> tuple[ModelSpec, dict[str, Any]]:
    """Return how a model is built, and the keys of its config.json that nothing read, with values.

    A key that the family reads counts as read even if the specification or the user replaces what
    the family makes of it.

    Args:
        overrides: tables that take precedence over the specification.

    Raises:
        SpecError, CheckpointError: one line with the file and what to do.
    """
    looked_up, path = set[str](), str(files.path)
    facts = _facts(files, looked_up)
    families = _families(files, facts)
    tables, base = [*families, overrides], format_table(files.checkpoint.format)
    if files.multimodal is not None:
        base = {**base, "tensors": files.multimodal.tensors}
    if _classifies(files, facts, families):
        tables.insert(1, format_table("classifier"))
    spec = resolve(tables, path, facts, base)
    stored = _Stored(files.checkpoint, spec.tensors, by_name(files.checkpoint, spec.tensors))
    if absent := _missing_heads(spec, stored):
        tables.append({"modules": {name: {"when": False} for name in absent}})
        spec = resolve(tables, path, facts, base)
    spec = _infer_from_tensors(spec, stored)
    unused = unread(files.config, looked_up)
    if consequences(unused, files.config, spec):
        for replaced in filter(None, (families[:-1], families)):
            with suppress(SpecError):  # it may be incomplete without the tables laid over it
                resolve(replaced, path, facts, base)
        unused = unread(files.config, looked_up)
    return spec, unused


def family_of(files: ModelFiles) -> str:
    """Return the family that matches a checkpoint. Raises `SpecError` if none or several match."""
    return str(find_family(_facts(files, set()), files.architectures, files.path))


def _families(files: ModelFiles, facts: CheckpointFacts) -> list[Mapping[str, Any]]:
    """Return the specification's tables, the most general first, or the matching family's.

    The tables about images of a multimodal model precede those that the user wrote.
    """
    if files.describes_model:
        tables = with_families(dict(files.own), files.path)
        for table in tables if files.enclosed else ():
            check_enclosed(files.path, "family", table.get("family"))
    else:
        # The family comes with jinfer. Keys that only choose it do not count as read.
        tables = with_families({**files.own, "family": family_of(files)}, files.path)
    if files.whole is not None and not any(VISION in table for table in tables):
        images = image_layer(facts, files.whole)
        return [*tables[:-1], *([images] if images else []), tables[-1]]
    return [*tables]


def reads_images(files: ModelFiles) -> bool:
    """Whether the model is of an architecture whose images can be read."""
    whole = files.whole
    known = whole and image_layer(_facts(files, set()), whole, complete=False)
    return bool(known)


def _classifies(
    files: ModelFiles, facts: CheckpointFacts, families: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether it is a decoder with a classification head that its family does not describe."""
    if any("encoder" in table or "classes" in table.get("decoder", {}) for table in families):
        return False
    if files.checkpoint.format == "gguf":
        key = f"{files.config.get('general.architecture', '')}.pooling_type"
        return files.config.get(key) == RANK and facts.has("cls.output.weight")
    return any(name.endswith(CLASSIFIES) for name in files.architectures)


def _facts(files: ModelFiles, looked_up: set[str]) -> CheckpointFacts:
    """Return functions that look up a checkpoint's config keys and tensors.

    Args:
        looked_up: receives the config keys that are looked up.
    """
    checkpoint, config = files.checkpoint, files.config
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    for prefix, usual in files.multimodal.prefixes.items() if files.multimodal else ():
        own = {n: shape for n, shape in shapes.items() if n.startswith(prefix)}
        shapes |= {usual + name.removeprefix(prefix): shape for name, shape in own.items()}
    if files.mmproj is not None:
        shapes |= {name: tensor.shape for name, tensor in files.mmproj.tensors.items()}
    rows = row_counter(shapes)

    def has(pattern: str) -> bool:
        return pattern in shapes or any(fnmatchcase(name, pattern) for name in shapes)

    if checkpoint.format != "gguf":
        file = "config.json" if checkpoint.format != "llama2c" else files.weights.name
        return CheckpointFacts(checkpoint.format, lookup_in(config, looked_up), has, file, rows)
    architecture = config.get("general.architecture", "")

    def lookup(key: str) -> Any:
        for full in (f"{architecture}.{key}", key):
            if config.get(full) is not None:
                looked_up.add(full)
                return without_infinity(config[full])
        return item_of_list(lookup, key)

    return CheckpointFacts("gguf", lookup, has, files.weights.name, rows)


def without_infinity(value: Any) -> Any:
    """Replace infinity by None in a list of GGUF metadata: such layers have no value."""
    if not isinstance(value, list):
        return value
    return [None if isinstance(v, float) and not isfinite(v) else v for v in value]


# The error of a stored sine: some were computed with angles in float32, and then rounded.
_ROUNDING = {"F64": 1e-4, "F32": 1e-4, "F16": 1e-3, "BF16": 4e-3}

_MAX_SHARED_LAYERS = 64

type _Modules = tuple[tuple[str, Block], ...]


@dataclass(frozen=True)
class _Stored:
    """The tensors of a checkpoint.

    Attributes:
        tensors: maps parameters to names of tensors.
        files: the checkpoint's tensors by these names.
    """

    checkpoint: Checkpoint
    tensors: TensorMap
    files: Mapping[str, Tensor]

    @property
    def is_native(self) -> bool:
        return isinstance(self.checkpoint, NativeCheckpoint)

    def find(self, parameter: str) -> Tensor | None:
        """Return a tensor of a parameter; of a native checkpoint, an array of it."""
        if isinstance(self.checkpoint, NativeCheckpoint):
            parts = self.checkpoint.parts
            names = (parameter, *(name for name in parts if name.startswith(f"{parameter}.")))
            return next((parts[name] for name in names if name in parts), None)
        place = self.tensors.source_of(parameter)
        known = (name for choice in place.candidates() for name in choice.names) if place else ()
        return next((self.files[name] for name in known if name in self.files), None)


def _infer_from_tensors(spec: ModelSpec, stored: _Stored) -> ModelSpec:
    """Adapt a specification to a checkpoint's tensors.

    The tensors of a native checkpoint cannot be compared, but a head that is not tied and positions
    that are not sinusoids are among its parameters.

    Raises:
        SpecError: the file cannot have so many layers or positions.
        CheckpointError: the checkpoint is damaged.
    """
    layers, count = sum(len(stack.layers) for stack in spec.stacks), len(stored.checkpoint.tensors)
    # Layers that share no tensors have a tensor each. More would only take time and memory.
    if layers > max(_MAX_SHARED_LAYERS, count):
        reason = f"is {layers} in all, but {stored.checkpoint.path.name} has only {count} tensors"
        raise SpecError(spec.path, "dims.layers", reason)

    def adapted(prefix: str, modules: _Modules) -> _Modules:
        return tuple((n, _adapted(b, f"{prefix}{n}.weight", stored, spec)) for n, b in modules)

    stacks = (replace(s, modules=adapted(f"{s.name}.", s.modules)) for s in spec.stacks)
    return replace(spec, shared=adapted("", spec.shared), stacks=tuple(stacks))


def _missing_heads(spec: ModelSpec, stored: _Stored) -> list[str]:
    """Return the vocabulary heads, shared and not tied, that the checkpoint has no tensor of.

    Embedding models are published without a head, even if `architectures` names a model with a
    head. A head that drafts for another model uses that model's.
    """
    if spec.follows is not None:
        return []
    heads = (n for n, block in spec.shared if isinstance(block, HeadSpec) and not block.tied)
    return [name for name in heads if stored.find(f"{name}.weight") is None]


def _adapted(block: Block, parameter: str, stored: _Stored, spec: ModelSpec) -> Block:
    if isinstance(block, HeadSpec) and block.tied:
        head = stored.find(parameter)
        return block if head is None else replace(block, tied=_is_copy(head, stored))
    if isinstance(block, SinusoidalPositionsSpec):
        table = stored.find(parameter)
        if table is not None and (stored.is_native or not _are_sinusoids(table, block)):
            return _learned(table, block, spec)
    return block


def _is_copy(head: Tensor, stored: _Stored) -> bool:
    """Whether a stored head is a copy of the embedding."""
    embed = None if stored.is_native else stored.find("embed.weight")
    return embed is not None and (head is embed or same_values(head, embed))


def _learned(
    table: Tensor, block: SinusoidalPositionsSpec, spec: ModelSpec
) -> LearnedPositionsSpec:
    """Return learned positions of the size of a stored table."""
    size = (table.shape or (0,))[0] - block.offset
    if spec.dims.get("context", 1) > size:
        reason = f"is {spec.dims.get('context', 1)}, but {table.name} has {size} positions"
        raise SpecError(spec.path, "dims.context", f"{reason}; set it to that")
    return LearnedPositionsSpec(
        kind="learned_positions", size=size, width=block.width, offset=block.offset
    )


def _are_sinusoids(table: Tensor, block: SinusoidalPositionsSpec) -> bool:
    """Whether a stored table equals the formula except for rounding.

    Rows before `offset` belong to no position.
    """
    if len(table.shape) != 2 or table.shape[1] != block.width:
        return False
    if table.type not in _ROUNDING:
        return False
    # Imported here: it imports Flax, and few checkpoints need it.
    from jinfer.nn.positions import sinusoids

    read, height = row_reader(table), max(1, PIECE // block.width)
    for begin in range(block.offset, table.shape[0], height):
        rows = slice(begin, min(begin + height, table.shape[0]))
        formula = sinusoids(block, np.arange(rows.start, rows.stop) - block.offset)
        if not np.allclose(read((), rows), formula, rtol=0, atol=_ROUNDING[table.type]):
            return False
    return True

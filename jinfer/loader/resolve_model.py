"""Resolving a model: from a specification or family, and a checkpoint's config, to a ModelSpec."""

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
from jinfer.modelspec.blocks import Block, HeadSpec, LearnedPositionsSpec, SinusoidalPositionsSpec
from jinfer.modelspec.config_lookup import lookup_in
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.resolve_spec import CheckpointFacts, resolve
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_files import CLASSIFIES, find_family, format_table, with_families
from jinfer.modelspec.spec_values import MissingKey, row_counter
from jinfer.modelspec.tensor_names import TensorMap


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


# How far off a stored sine may be: some were computed with angles in float32, and then rounded.
_ROUNDING = {"F64": 1e-4, "F32": 1e-4, "F16": 1e-3, "BF16": 4e-3}

_MAX_SHARED_LAYERS = 64

type _Modules = tuple[tuple[str, Block], ...]


def infer_from_tensors(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """The specification as this checkpoint's tensors decide.

    Of a native checkpoint, what was found when it was converted: its source cannot be read, but
    a head that is not tied, or a table that is not the sinusoids, is among its parameters.

    Raises:
        SpecError: the file cannot have so many layers, or so many positions.
        CheckpointError: the checkpoint is broken.
    """
    _check_layers(spec, checkpoint)
    stored = _Stored(checkpoint, spec.tensors, by_name(checkpoint, spec.tensors))

    def settled(prefix: str, modules: _Modules) -> _Modules:
        return tuple((n, _settled(b, f"{prefix}{n}.weight", stored, spec)) for n, b in modules)

    stacks = (replace(s, modules=settled(f"{s.name}.", s.modules)) for s in spec.stacks)
    return replace(spec, shared=settled("", spec.shared), stacks=tuple(stacks))


def missing_heads(spec: ModelSpec, checkpoint: Checkpoint) -> list[str]:
    """The shared vocabulary heads, not tied, of which the checkpoint has no tensor.

    Embedders are published so: the model of transformers that has no head, whatever `architectures`
    of config.json says. A head that drafts for another model has that model's instead.
    """
    if spec.follows is not None:
        return []
    stored = _Stored(checkpoint, spec.tensors, by_name(checkpoint, spec.tensors))
    heads = (n for n, block in spec.shared if isinstance(block, HeadSpec) and not block.tied)
    return [name for name in heads if stored.find(f"{name}.weight") is None]


def _check_layers(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Refuses layers that the file cannot have, before they take time and memory.

    A layer has a tensor of its own, but for models whose layers share theirs.
    """
    layers, tensors = sum(len(stack.layers) for stack in spec.stacks), len(checkpoint.tensors)
    if layers > max(_MAX_SHARED_LAYERS, tensors):
        reason = f"is {layers} in all, but {checkpoint.path.name} has only {tensors} tensors"
        raise SpecError(spec.path, "dims.layers", reason)


@dataclass(frozen=True)
class _Stored:
    """What a checkpoint has.

    Attributes:
        files: its tensors by the names that `tensors` knows.
    """

    checkpoint: Checkpoint
    tensors: TensorMap
    files: Mapping[str, Tensor]

    @property
    def is_converted(self) -> bool:
        return isinstance(self.checkpoint, NativeCheckpoint)

    def find(self, parameter: str) -> Tensor | None:
        """A tensor that is the parameter's, or of a native checkpoint an array of it."""
        if isinstance(self.checkpoint, NativeCheckpoint):
            parts = self.checkpoint.parts
            names = (parameter, *(name for name in parts if name.startswith(f"{parameter}.")))
            return next((parts[name] for name in names if name in parts), None)
        place = self.tensors.source_of(parameter)
        known = (name for choice in place.candidates() for name in choice.names) if place else ()
        return next((self.files[name] for name in known if name in self.files), None)


def _settled(block: Block, parameter: str, stored: _Stored, spec: ModelSpec) -> Block:
    if isinstance(block, HeadSpec) and block.tied:
        own = stored.find(parameter)
        return block if own is None else replace(block, tied=_is_copy(own, stored))
    if isinstance(block, SinusoidalPositionsSpec):
        own = stored.find(parameter)
        if own is not None and (stored.is_converted or not _are_sinusoids(own, block)):
            return _learned(own, block, spec)
    return block


def _is_copy(head: Tensor, stored: _Stored) -> bool:
    """Whether a head is the embedding once more."""
    embed = None if stored.is_converted else stored.find("embed.weight")
    return embed is not None and (head is embed or same_values(head, embed))


def _learned(
    table: Tensor, block: SinusoidalPositionsSpec, spec: ModelSpec
) -> LearnedPositionsSpec:
    """The positions that a table has."""
    size = (table.shape or (0,))[0] - block.offset
    if spec.dims.get("context", 1) > size:
        reason = f"is {spec.dims.get('context', 1)}, but {table.name} has {size} positions"
        raise SpecError(spec.path, "dims.context", f"{reason}; set it to that")
    return LearnedPositionsSpec(
        kind="learned_positions", size=size, width=block.width, offset=block.offset
    )


def _are_sinusoids(table: Tensor, block: SinusoidalPositionsSpec) -> bool:
    """Whether a stored table says no more than the formula, but for rounding.

    Rows before `offset` are of no position.
    """
    if len(table.shape) != 2 or table.shape[1] != block.width:
        return False
    if table.type not in _ROUNDING:
        return False
    # Here: it brings Flax along, which few checkpoints need.
    from jinfer.nn.positions import sinusoids

    read, height = row_reader(table), max(1, PIECE // block.width)
    for begin in range(block.offset, table.shape[0], height):
        rows = slice(begin, min(begin + height, table.shape[0]))
        formula = sinusoids(block, np.arange(rows.start, rows.stop) - block.offset)
        if not np.allclose(read((), rows), formula, rtol=0, atol=_ROUNDING[table.type]):
            return False
    return True

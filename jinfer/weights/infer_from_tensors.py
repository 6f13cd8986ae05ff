"""Inference from a checkpoint's tensors: is there a head, is it tied, are positions learned.

A specification says that a head is tied, or that positions are sinusoids, for all checkpoints of a
family; one that stores a head or a table of its own means that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jinfer.checkpoint import Checkpoint, Tensor
from jinfer.checkpoint.native_checkpoint import NativeCheckpoint
from jinfer.modelspec.block import Block
from jinfer.modelspec.blocks import HeadSpec
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.position_blocks import LearnedPositionsSpec, SinusoidalPositionsSpec
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.tensor_names import TensorMap
from jinfer.weights.row_reader import PIECE, row_reader, same_values
from jinfer.weights.tensor_mapping import by_name

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

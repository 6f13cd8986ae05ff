"""Weights that are quantized with error feedback once, and mapped at the next start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jinfer.checkpoint import Checkpoint
from jinfer.checkpoint.converted import ConvertedCheckpoint, Packed, written
from jinfer.model import AbstractModel, build
from jinfer.quant import OutlierTensor, QuantizedTensor
from jinfer.quant.feedback import VERSION
from jinfer.quant.tensor import Activations
from jinfer.records import dataclass, replace
from jinfer.spec.model import ModelSpec
from jinfer.weights import kept
from jinfer.weights.converted import (
    load_converted,
    packing,
    part_names,
    place_converted,
    stored_as,
    weight_settings,
)
from jinfer.weights.load import Place, load
from jinfer.weights.mapping import Origin
from jinfer.weights.methods import obstacle, searched
from jinfer.weights.storage import Storage, stored
from jinfer.weights.windows import Wanted
from jinfer.weights.writing import Writer


@dataclass(frozen=True)
class Fed:
    """Weights of which some are to be quantized with error feedback.

    Attributes:
        model: all its parameters plain, in the types that they are to have.
        spec, checkpoint: how it is built, and from what.
        origins, storages: as `load` takes them.
        activations: of products with quantized weights on a CPU.
        free_memory: gives the bytes that are free; None: as many as it takes.
    """

    model: AbstractModel
    spec: ModelSpec
    checkpoint: Checkpoint
    origins: Mapping[str, Origin]
    storages: Mapping[str, Storage]
    activations: Activations
    free_memory: Callable[[], int] | None

    def load(self, progress: bool) -> tuple[Any, ...]:
        """The parameters, in the order of `model.names`; searched where feedback cannot be."""
        entry = self._entry(progress)
        if entry is None:
            return load(self.model, self.origins, searched(self.storages), progress=progress)
        return load_converted(stored_as(self.model, entry, self.activations), entry)

    def place(self, place: Place, progress: bool, names: Wanted) -> tuple[Any, ...]:
        """What is made of each parameter that is wanted, as it is read."""
        entry = self._entry(progress)
        if entry is None:
            rest = searched(self.storages)
            return load(self.model, self.origins, rest, progress=progress, place=place, only=names)
        whole = stored_as(self.model, entry, self.activations)
        return place_converted(whole, entry, place, names)

    def _entry(self, progress: bool) -> ConvertedCheckpoint | None:
        """The weights as they are kept, quantized now if they are not yet; None: they cannot be."""
        try:
            parent = kept.folder()
            key = self._key()
            entry = kept.find(parent, key)
            if entry is None:
                self._check()
                _say(f"weights are quantized with error feedback, once; they are kept in {parent}")
                shown = progress or sys.stderr.isatty()
                entry = kept.make(
                    parent, key, self._nbytes(), lambda folder: self._write(folder, shown)
                )
        except kept.NotKept as reason:
            _say(f"{reason}; weights are quantized without error feedback")
            return None
        return entry

    def _check(self) -> None:
        from jinfer.weights.texts import TOKENS

        free = sys.maxsize if self.free_memory is None else self.free_memory()
        reason = obstacle(self.model, self.spec, self.storages, TOKENS, free)
        if reason is not None:
            raise kept.NotKept(reason)

    def _key(self) -> str:
        spec = self.spec
        types = [str(parameter.dtype) for parameter in self.model.parameters]
        storages = [
            (name, replace(each, activations="float"), each.columns)
            for name, each in self.storages.items()
        ]
        built = (sorted(spec.dims.items()), spec.shared, spec.stacks, spec.tensors)
        return kept.key_of(self.checkpoint, VERSION, built, types, storages)

    def _nbytes(self) -> int:
        leaves = jax.tree.leaves(stored(self.model, self.storages).parameters)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def _write(self, folder: Path, progress: bool) -> None:
        """Quantizes, and writes what comes of it to `model.safetensors`, or several such files."""
        # Here: weights that are kept already need none of it.
        from jinfer.weights.sequential import Sequential
        from jinfer.weights.texts import usual_texts

        stack = self.spec.stacks[0].name
        plain = build(self.spec, "float32")
        texts = usual_texts(self.spec, plain, self.origins, self.storages, progress=progress)
        found = Sequential(
            self.model, plain, stack, self.origins, self.storages, texts, progress=progress
        )
        writer, packed = Writer(folder), dict[str, Packed]()
        for name, tensor in found:
            writer.add({part: np.asarray(array) for part, array in part_names(name, tensor)})
            if isinstance(tensor, QuantizedTensor | OutlierTensor):
                packed[name] = packing(tensor)
        shared = {name: first for name, first in found.same.items() if name != first}
        # The specification is at hand whenever this is read, so nothing of the source is kept.
        source = replace(self.checkpoint, tensors={}, metadata={})
        writer.finish(written(source, packed, shared, weight_settings(self.spec.quantization)))


def _say(text: str) -> None:
    print(f"jinfer: {text}", file=sys.stderr)

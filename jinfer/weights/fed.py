"""Weights that are quantized with error feedback once, and mapped at the next start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinfer.checkpoint import Checkpoint
from jinfer.checkpoint.converted import ConvertedCheckpoint
from jinfer.model import AbstractModel, build
from jinfer.quant.feedback import VERSION
from jinfer.quant.tensor import Activations
from jinfer.records import dataclass
from jinfer.spec.model import ModelSpec
from jinfer.weights import kept
from jinfer.weights.converted import load_converted, place_converted, stored_as
from jinfer.weights.entry import EntryWriter, entry_bytes, entry_key, say
from jinfer.weights.load import Place
from jinfer.weights.mapping import Origin
from jinfer.weights.methods import obstacle, searched
from jinfer.weights.searched import Searched
from jinfer.weights.storage import Storage
from jinfer.weights.windows import Wanted


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
            return self._searched().load(progress)
        return load_converted(stored_as(self.model, entry, self.activations), entry)

    def place(self, place: Place, progress: bool, names: Wanted) -> tuple[Any, ...]:
        """What is made of each parameter that is wanted, as it is read."""
        entry = self._entry(progress)
        if entry is None:
            return self._searched().place(place, progress, names)
        whole = stored_as(self.model, entry, self.activations)
        return place_converted(whole, entry, place, names)

    def _entry(self, progress: bool) -> ConvertedCheckpoint | None:
        """The weights as they are kept, quantized now if they are not yet; None: they cannot be."""
        try:
            parent = kept.folder()
            key = entry_key(VERSION, self.model, self.spec, self.checkpoint, self.storages)
            entry = kept.find(parent, key)
            if entry is None:
                self._check()
                say(f"weights are quantized with error feedback, once; they are kept in {parent}")
                shown, size = (
                    progress or sys.stderr.isatty(),
                    entry_bytes(self.model, self.storages),
                )
                entry = kept.make(parent, key, size, lambda folder: self._write(folder, shown))
        except kept.NotKept as reason:
            say(f"{reason}; weights are quantized without error feedback")
            return None
        return entry

    def _searched(self) -> Searched:
        rest = searched(self.storages)
        return Searched(
            self.model, self.spec, self.checkpoint, self.origins, rest, self.activations
        )

    def _check(self) -> None:
        from jinfer.weights.texts import TOKENS

        free = sys.maxsize if self.free_memory is None else self.free_memory()
        reason = obstacle(self.model, self.spec, self.storages, TOKENS, free)
        if reason is not None:
            raise kept.NotKept(reason)

    def _write(self, folder: Path, progress: bool) -> None:
        """Quantizes, and writes what comes of it."""
        # Here: weights that are kept already need none of it.
        from jinfer.weights.sequential import Sequential
        from jinfer.weights.texts import usual_texts

        stack = self.spec.stacks[0].name
        plain = build(self.spec, "float32")
        texts = usual_texts(self.spec, plain, self.origins, self.storages, progress=progress)
        found = Sequential(
            self.model, plain, stack, self.origins, self.storages, texts, progress=progress
        )
        writer = EntryWriter(folder)
        for name, tensor in found:
            writer.add(name, tensor)
        same = {name: first for name, first in found.same.items() if name != first}
        writer.finish(self.spec, self.checkpoint, same)

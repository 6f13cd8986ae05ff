"""Weights that are quantized as they are read: many of them once, and mapped at the next start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax

from jinfer.checkpoint import Checkpoint
from jinfer.checkpoint.native_checkpoint import ConvertedCheckpoint
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.abstract_model import AbstractModel
from jinfer.quant.quantized_tensor import Activations
from jinfer.weights import quantized_cache
from jinfer.weights.cache_entry import EntryWriter, entry_bytes, entry_key, say
from jinfer.weights.load_native import load_converted, place_converted, stored_as
from jinfer.weights.load_weights import Place, load, parameter_shapes
from jinfer.weights.row_slices import Wanted
from jinfer.weights.storage_plan import Storage
from jinfer.weights.tensor_mapping import Origin

_VERSION = "search 1"  # another where the same weights would get other codes
_FEWEST = 1 << 26  # weights, which take two seconds of two cores


@dataclass(frozen=True)
class Searched:
    """Weights of which some may be to be quantized, each for itself.

    Attributes:
        model: all its parameters plain, in the types that they are to have.
        spec, checkpoint: how it is built, and from what.
        origins, storages: as `load` takes them.
        activations: of products with quantized weights on a CPU.
    """

    model: AbstractModel
    spec: ModelSpec
    checkpoint: Checkpoint
    origins: Mapping[str, Origin]
    storages: Mapping[str, Storage]
    activations: Activations

    def load(self, progress: bool) -> tuple[Any, ...]:
        """The parameters, in the order of `model.names`."""
        entry = self._entry(progress)
        if entry is not None:
            return self.load_entry(entry)
        return load(self.model, self.origins, self.storages, progress=progress)

    def place(self, place: Place, progress: bool, names: Wanted) -> tuple[Any, ...]:
        """What is made of each parameter that is wanted, as it is read."""
        entry = self._entry(progress)
        if entry is not None:
            return self.place_entry(entry, place, names)
        own = self.storages
        return load(self.model, self.origins, own, progress=progress, place=place, only=names)

    def load_entry(self, entry: ConvertedCheckpoint) -> tuple[Any, ...]:
        """As `load`, of what is kept."""
        return load_converted(stored_as(self.model, entry, self.activations), entry)

    def place_entry(
        self, entry: ConvertedCheckpoint, place: Place, names: Wanted
    ) -> tuple[Any, ...]:
        """As `place`, of what is kept."""
        return place_converted(stored_as(self.model, entry, self.activations), entry, place, names)

    def kept_as(
        self,
        storages: Mapping[str, Storage],
        how: str,
        version: int | str,
        write: Callable[[Path, bool], None],
        progress: bool,
        check: Callable[[], None] = lambda: None,
    ) -> ConvertedCheckpoint:
        """The weights as they are kept, quantized now if they are not yet.

        Args:
            storages: of those that are quantized.
            how: that is done, in words; "" as all is.
            version: of what does it.
            write: does it, and writes what comes of it to a folder, with a bar or without.
            progress: show a bar also where standard error is no terminal.
            check: is called before; raises `NotKept` where it cannot be done.

        Raises:
            NotKept: there is no room for it, or `check` says so.
        """
        parent = quantized_cache.folder()
        key = entry_key(version, self.model, self.spec, self.checkpoint, storages)
        entry = quantized_cache.find(parent, key)
        if entry is not None:
            return entry
        check()
        say(f"weights are quantized{how}, once; they are kept in {parent}")
        shown, size = progress or sys.stderr.isatty(), entry_bytes(self.model, storages)
        return quantized_cache.make(parent, key, size, lambda folder: write(folder, shown))

    def _entry(self, progress: bool) -> ConvertedCheckpoint | None:
        """The weights as they are kept; None: they are not."""
        if not self._takes_long():
            return None
        try:
            return self.kept_as(self.storages, "", _VERSION, self._write, progress)
        except quantized_cache.NotWanted:
            return None
        except (quantized_cache.NotKept, OSError) as reason:
            say(f"{reason}; weights are quantized at each start")
            return None

    def _takes_long(self) -> bool:
        """Whether it does, and this process reads all of them."""
        shapes = parameter_shapes(self.model)
        count = sum(prod(shapes[name]) for name, each in self.storages.items() if not each.kept)
        return count >= _FEWEST and jax.process_count() == 1

    def _write(self, folder: Path, progress: bool) -> None:
        writer, same = EntryWriter(folder), dict[str, str]()

        def place(names: Sequence[str], values: Any) -> None:
            first, *others = names
            writer.add(first, values)
            same.update(dict.fromkeys(others, first))

        load(self.model, self.origins, self.storages, progress=progress, place=place)
        writer.finish(self.spec, self.checkpoint, same)

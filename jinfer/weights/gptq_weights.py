"""Weights that are quantized with error feedback once, and mapped at the next start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinfer.checkpoint.native_checkpoint import ConvertedCheckpoint
from jinfer.nn.abstract_model import build
from jinfer.quant.gptq import VERSION
from jinfer.weights import quantized_cache
from jinfer.weights.cache_entry import EntryWriter, say
from jinfer.weights.choose_method import obstacle
from jinfer.weights.load_weights import Place
from jinfer.weights.quantized_weights import Searched
from jinfer.weights.row_slices import Wanted
from jinfer.weights.storage_plan import Storage


@dataclass(frozen=True)
class Fed:
    """Weights of which some are to be quantized with error feedback.

    Attributes:
        rest: the same weights, searched: what is computed where feedback cannot be.
        storages: with feedback.
        free_memory: gives the bytes that are free; None: as many as it takes.
    """

    rest: Searched
    storages: Mapping[str, Storage]
    free_memory: Callable[[], int] | None

    def load(self, progress: bool) -> tuple[Any, ...]:
        """The parameters, in the order of `model.names`; searched where feedback cannot be."""
        entry = self._entry(progress)
        return self.rest.load(progress) if entry is None else self.rest.load_entry(entry)

    def place(self, place: Place, progress: bool, names: Wanted) -> tuple[Any, ...]:
        """What is made of each parameter that is wanted, as it is read."""
        entry = self._entry(progress)
        if entry is None:
            return self.rest.place(place, progress, names)
        return self.rest.place_entry(entry, place, names)

    def _entry(self, progress: bool) -> ConvertedCheckpoint | None:
        """The weights as they are kept, quantized now if they are not yet; None: they cannot be."""
        how, write = " with error feedback", self._write
        try:
            return self.rest.kept_as(self.storages, how, VERSION, write, progress, self._check)
        except quantized_cache.NotKept as reason:
            say(f"{reason}; weights are quantized without error feedback")
            return None

    def _check(self) -> None:
        from jinfer.weights.calibration_texts import TOKENS

        free = sys.maxsize if self.free_memory is None else self.free_memory()
        reason = obstacle(self.rest.model, self.rest.spec, self.storages, TOKENS, free)
        if reason is not None:
            raise quantized_cache.NotKept(reason)

    def _write(self, folder: Path, progress: bool) -> None:
        """Quantizes, and writes what comes of it."""
        # Here: weights that are kept already need none of it.
        from jinfer.weights.calibration_texts import usual_texts
        from jinfer.weights.layerwise_gptq import Sequential

        model, spec, origins = self.rest.model, self.rest.spec, self.rest.origins
        plain = build(spec, "float32")
        texts = usual_texts(spec, plain, origins, self.storages, progress=progress)
        stack = spec.stacks[0].name
        found = Sequential(model, plain, stack, origins, self.storages, texts, progress=progress)
        writer = EntryWriter(folder)
        for name, tensor in found:
            writer.add(name, tensor)
        same = {name: first for name, first in found.same.items() if name != first}
        writer.finish(spec, self.rest.checkpoint, same)

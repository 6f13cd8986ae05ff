"""What is kept of weights that were quantized here, and by which name: see `kept`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jinfer.checkpoint import Checkpoint
from jinfer.checkpoint.native_checkpoint import Packed, written
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.abstract_model import AbstractModel
from jinfer.progress import line
from jinfer.quant import OutlierTensor, QuantizedTensor
from jinfer.weights import quantized_cache
from jinfer.weights.load_native import packing, part_names, weight_settings
from jinfer.weights.safetensors_writer import Writer
from jinfer.weights.storage_plan import Storage, stored

_SHARD_BYTES = 1 << 30  # of a file, which memory holds until it is written


def entry_key(
    version: int | str,
    model: AbstractModel,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    storages: Mapping[str, Storage],
) -> str:
    """The name of an entry.

    Args:
        version: of what finds the codes.
        model: all its parameters plain, in the types that they are to have.
        spec, checkpoint: how it is built, and from what.
        storages: of the parameters that are quantized.
    """
    types = [str(parameter.dtype) for parameter in model.parameters]
    formats = [
        (name, replace(each, activations="float"), each.columns) for name, each in storages.items()
    ]
    built = (sorted(spec.dims.items()), spec.shared, spec.stacks, spec.tensors)
    return quantized_cache.key_of(checkpoint, version, built, types, formats)


def entry_bytes(model: AbstractModel, storages: Mapping[str, Storage]) -> int:
    """What an entry takes, about."""
    leaves = jax.tree.leaves(stored(model, storages).parameters)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


class EntryWriter:
    """Writes parameters to `model.safetensors`, or several such files; from any thread."""

    def __init__(self, folder: Path) -> None:
        self._writer, self._packed = Writer(folder, _SHARD_BYTES), dict[str, Packed]()
        self._lock = threading.Lock()

    def add(self, name: str, tensor: Any) -> None:
        """Adds a parameter of NumPy's arrays."""
        arrays = {part: np.asarray(array) for part, array in part_names(name, tensor)}
        with self._lock:
            self._writer.add(arrays)
            if isinstance(tensor, QuantizedTensor | OutlierTensor):
                self._packed[name] = packing(tensor)

    def finish(self, spec: ModelSpec, checkpoint: Checkpoint, same: Mapping[str, str]) -> None:
        """Writes what is left.

        Args:
            same: name of each parameter that was not added -> that of the one it is the same as.
        """
        # The specification is at hand whenever this is read, so nothing of the source is kept.
        source = replace(checkpoint, tensors={}, metadata={})
        settings = weight_settings(spec.quantization)
        self._writer.finish(written(source, self._packed, same, settings))


def say(text: str) -> None:
    """A line on standard error."""
    line(f"jinfer: {text}")

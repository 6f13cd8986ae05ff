"""A model's weights: read and quantized, or taken as a converted checkpoint has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jinfer.checkpoint.converted import ConvertedCheckpoint
from jinfer.converted import check_settings, load_converted, stored_as
from jinfer.load import find_origins, load
from jinfer.model import AbstractModel
from jinfer.opened import Opened
from jinfer.storage import choose_storages, stored


@dataclass(frozen=True)
class Weights:
    """Weights that are yet to be loaded.

    Attributes:
        model: with its parameters as they will be stored.
        load: gives them, in the order of `model.names`, and shows a bar if it is told to.
    """

    model: AbstractModel
    load: Callable[[bool], tuple[Any, ...]]


def find_weights(model: AbstractModel, opened: Opened) -> Weights:
    """Finds the parameters of a model in its checkpoint.

    Args:
        model: as `build` gives it, all its parameters plain.

    Raises:
        LoadError: checkpoint and specification do not fit each other.
        SpecError: something is to be quantized that cannot be.
        CheckpointError: the checkpoint is broken.
    """
    spec, checkpoint = opened.spec, opened.checkpoint
    if isinstance(checkpoint, ConvertedCheckpoint):
        check_settings(spec.quantization, checkpoint, spec.path)
        whole = stored_as(model, checkpoint, opened.activations)
        return Weights(whole, lambda progress: load_converted(whole, checkpoint))
    origins = find_origins(model, checkpoint, spec.tensors)
    storages = choose_storages(model, spec.quantization, origins, opened.activations, spec.path)
    return Weights(
        stored(model, storages),
        lambda progress: load(model, origins, storages, progress=progress),
    )

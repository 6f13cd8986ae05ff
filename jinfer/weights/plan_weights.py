"""A model's weights: read and quantized, or taken as a converted checkpoint has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jinfer.checkpoint import Checkpoint
from jinfer.checkpoint.native_checkpoint import ConvertedCheckpoint
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.matmul.half_precision import faster_as_whole_numbers, reads_as_stored
from jinfer.quant.quantized_tensor import Activations
from jinfer.weights.choose_method import fed_names, searched, with_feedback
from jinfer.weights.load_native import check_settings, load_converted, place_converted, stored_as
from jinfer.weights.load_weights import Place, find_origins
from jinfer.weights.quantized_weights import Searched
from jinfer.weights.row_slices import Wanted
from jinfer.weights.storage_plan import choose_storages, in_types, kept_types, stored

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@dataclass(frozen=True)
class Weights:
    """Weights that are yet to be loaded.

    Attributes:
        model: with its parameters as they will be stored.
        load: gives them, in the order of `model.names`, and shows a bar if it is told to.
        place: gives what is made of each that is wanted, as it is read; with or without a bar.
    """

    model: AbstractModel
    load: Callable[[bool], tuple[Any, ...]]
    place: Callable[[Place, bool, Wanted], tuple[Any, ...]]


def find_weights(
    model: AbstractModel,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    activations: Activations,
    free_memory: Callable[[], int] | None = None,
) -> Weights:
    """Finds the parameters of a model in its checkpoint.

    Args:
        model: as `build` gives it, all its parameters plain.
        spec, checkpoint: how it is built, and from what.
        activations: of products on a CPU, as the specification's key says.
        free_memory: gives the bytes that are free; None: as many as it takes.

    Raises:
        LoadError: checkpoint and specification do not fit each other.
        SpecError: something is to be quantized that cannot be.
        CheckpointError: the checkpoint is broken.
    """
    if isinstance(checkpoint, ConvertedCheckpoint):
        check_settings(spec.quantization, checkpoint, spec.path)
        firsts = {name: checkpoint.same.get(name, name) for name in model.names}
        parts = checkpoint.parts
        types = {name: parts[first].type for name, first in firsts.items() if first in parts}
        model = _typed(model, types, activations)
        whole = stored_as(model, checkpoint, activations)
        return Weights(
            whole,
            lambda progress: load_converted(whole, checkpoint),
            lambda place, progress, names: place_converted(whole, checkpoint, place, names),
        )
    origins = find_origins(model, checkpoint, spec.tensors)
    halves = as_whole_numbers(model.modules.dtype, activations)
    model = _typed(model, kept_types(model, spec.quantization, origins), activations)
    storages = choose_storages(model, spec.quantization, origins, activations, spec.path, halves)
    storages = with_feedback(model, spec, origins, storages)
    whole = stored(model, storages)
    if fed_names(storages):
        # Here: others need none of it.
        from jinfer.weights.gptq_weights import Fed

        exact = replace(model, rounded=False)  # what is found is to be the same on every processor
        rest = Searched(exact, spec, checkpoint, origins, searched(storages), activations)
        found: Fed | Searched = Fed(rest, storages, free_memory)
    else:
        found = Searched(model, spec, checkpoint, origins, storages, activations)
    return Weights(whole, found.load, found.place)


def as_whole_numbers(dtype: DTypeLike, activations: Activations) -> bool:
    """Whether matrices in F16 are kept as whole numbers here; see `jinfer.quant.f16_as_int`.

    Args:
        dtype: of the computation.
    """
    wider = np.dtype(dtype).itemsize > 2
    return wider and activations == "int8" and reads_as_stored() and faster_as_whole_numbers()


def _typed(
    model: AbstractModel, types: Mapping[str, str], activations: Activations
) -> AbstractModel:
    """The model with matrices as the checkpoint has them, where products read them so."""
    if not reads_as_stored():
        return model
    return replace(in_types(model, types), rounded=activations == "int8")

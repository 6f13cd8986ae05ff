"""The plan of a model's weights: where each parameter comes from, and how it is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jinfer.checkpoint import Checkpoint
from jinfer.checkpoint.native_checkpoint import NativeCheckpoint
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.modelspec.quant_format import Kind
from jinfer.nn.abstract_model import AbstractModel
from jinfer.quant.quantized_tensor import Activations
from jinfer.weights.choose_method import with_gptq
from jinfer.weights.native_parameters import NativeOrigin, Source, native_origins
from jinfer.weights.power_scaling import PowerScale
from jinfer.weights.shared_arrays import same_arrays
from jinfer.weights.storage_plan import Storage, plan_storages
from jinfer.weights.tensor_mapping import find_origins


@dataclass(frozen=True)
class WeightPlan:
    """All that `load` needs to know of a model's weights; nothing of them has been read yet.

    Attributes:
        plain: the model with its parameters as they are if none is quantized.
        spec, checkpoint: what the model is built by, and what it is loaded from.
        origins: name of each parameter -> where it comes from.
        storages: name of each parameter to be quantized -> its format and method; of a native
            checkpoint none, as its parameters are stored as they are to be.
        activations: of products with quantized weights on a CPU.
        kv_cache: the type of the KV cache, where queries and keys may be equalized for it.
        free_memory: gives the bytes that are free for GPTQ; None: there is no bound.
        scales: name of each parameter to be scaled when it is loaded -> by what.
    """

    plain: AbstractModel
    spec: ModelSpec
    checkpoint: Checkpoint
    origins: Mapping[str, Source]
    storages: Mapping[str, Storage] = field(default_factory=dict)
    activations: Activations = "float"
    kv_cache: Kind | None = None
    free_memory: Callable[[], int] | None = None
    scales: Mapping[str, PowerScale] = field(default_factory=dict)

    @cached_property
    def model(self) -> AbstractModel:
        """The model with its parameters as they will be loaded."""

        def loaded(name: str, parameter: Any) -> Any:
            origin, storage = self.origins[name], self.storages.get(name)
            if isinstance(origin, NativeOrigin):
                return origin.loaded
            return parameter if storage is None else storage.abstract(parameter.shape)

        parameters = map(loaded, self.plain.names, self.plain.parameters)
        return replace(self.plain, parameters=tuple(parameters))

    @cached_property
    def same(self) -> dict[str, str]:
        """Name of each parameter -> that of the first one which is the same array."""
        return same_arrays(self.plain, self.origins, self.storages)


def plan_weights(
    model: AbstractModel,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    activations: Activations,
    *,
    kv_cache: Kind | None = None,
    free_memory: Callable[[], int] | None = None,
) -> WeightPlan:
    """Plans a model's weights.

    Args:
        model: as `build` gives it, all its parameters plain.
        spec, checkpoint, activations, kv_cache, free_memory: as in `WeightPlan`.

    Raises:
        LoadError: checkpoint and specification do not fit each other.
        SpecError: a parameter that cannot be quantized as the specification says.
        CheckpointError: the checkpoint is damaged.
    """
    plan = WeightPlan(
        model, spec, checkpoint, {}, {}, activations, kv_cache=kv_cache, free_memory=free_memory
    )
    if isinstance(checkpoint, NativeCheckpoint):
        return native_plan(plan, checkpoint)
    origins = find_origins(model, checkpoint, spec.tensors)
    plain, storages = plan_storages(model, spec, origins, activations)
    storages = with_gptq(plain, spec, origins, storages)
    return replace(plan, plain=plain, origins=origins, storages=storages)


def native_plan(plan: WeightPlan, checkpoint: NativeCheckpoint) -> WeightPlan:
    """The same weights, read from a native checkpoint. Raises as `plan_weights`."""
    plain, origins = native_origins(plan.plain, plan.spec, checkpoint, plan.activations)
    return replace(plan, plain=plain, checkpoint=checkpoint, origins=origins, storages={})

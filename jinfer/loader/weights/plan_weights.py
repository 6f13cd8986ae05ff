"""Plan of the weights: the origin of each parameter, and the format in which it is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import jax

from jinfer.loader.checkpoint import Checkpoint
from jinfer.loader.checkpoint.native_checkpoint import NativeCheckpoint
from jinfer.loader.weights.native_parameters import NativeOrigin, Source, native_origins
from jinfer.loader.weights.power_scaling import PowerScale
from jinfer.loader.weights.storage_plan import PER_PRODUCT, PER_WEIGHT, Storage, plan_storages
from jinfer.loader.weights.tensor_mapping import Origin, find_origins, parameter_shapes
from jinfer.modelspec.layer_spec import shared_keys
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.abstract_model import AbstractModel
from jinfer.ops.attention.kv_cache import STATE
from jinfer.ops.cpu_library import cores
from jinfer.quant.quantized_tensor import Activations
from jinfer.quant_format import Kind

# Numbers of calibration texts.
TOKENS = 1 << 13  # tokens that the model reads
LENGTH = 256  # tokens of a generated text
AT_ONCE = 32  # texts that are generated together

MAX_SECONDS = 300.0  # limit of "auto"
_MAX_LEVELS = 64  # above, a search loses next to nothing
_FEWEST = 1 << 20  # weights for which GPTQ is worth compiling its programs
_CORES = 16  # more do not help


def with_gptq(
    model: AbstractModel,
    spec: ModelSpec,
    origins: Mapping[str, Origin],
    storages: Mapping[str, Storage],
) -> dict[str, Storage]:
    """Choose GPTQ for the parameters that the specification allows.

    GPTQ does not apply to tables that are looked up, nor to a matrix that layers share. "auto"
    chooses it below 8 bits, for models that generate text, are not tiny, and run in a single
    process.
    """
    method = spec.quantization.method
    if method not in ("auto", "gptq"):
        return dict(storages)
    same = same_arrays(model, origins, storages)
    uses = Counter(same.values())
    roles = dict(zip(model.names, model.roles, strict=True))
    stacks = tuple(f"{stack.name}.{i}." for stack in spec.stacks for i in range(len(stack.layers)))

    def gets_gptq(name: str, storage: Storage) -> bool:
        if storage.as_in_file or roles[name] == "table" or uses[same[name]] > 1:
            return False
        if method == "auto" and storage.format.levels > _MAX_LEVELS:
            return False
        return roles[name] == "head" or name.startswith(stacks)

    fed = {
        name: replace(storage, method="gptq") if gets_gptq(name, storage) else storage
        for name, storage in storages.items()
    }
    if method == "auto":
        shapes = parameter_shapes(model)
        count = sum(prod(shapes[name]) for name in gptq_names(fed))
        few = count < _FEWEST or not spec.generates
        apart = len(spec.stacks) != 1 or jax.process_count() > 1 or _is_entangled(model)
        if few or apart:
            return dict(storages)
    return fed


def _is_entangled(model: AbstractModel) -> bool:
    """Whether its layers depend on more than the hidden states of the layer before."""
    states = any(shape.group == STATE for shape in model.caches.values())
    stacks = model.modules.spec.stacks
    return states or any(stack.carried or shared_keys(stack.layers) for stack in stacks)


def without_gptq(storages: Mapping[str, Storage]) -> dict[str, Storage]:
    """Replace GPTQ by a search."""
    return {
        name: replace(storage, method="mse") if storage.method == "gptq" else storage
        for name, storage in storages.items()
    }


def gptq_names(storages: Mapping[str, Storage]) -> list[str]:
    """Return the parameters that GPTQ quantizes."""
    return [name for name, storage in storages.items() if storage.method == "gptq"]


def obstacle(
    model: AbstractModel, spec: ModelSpec, storages: Mapping[str, Storage], tokens: int, free: int
) -> str | None:
    """Return the reason why GPTQ cannot or should not be used; None if it can.

    Args:
        tokens: calibration tokens.
        free: bytes of memory.
    """
    if len(spec.stacks) != 1:
        return "an encoder-decoder reads two texts at a time"
    if not model.vocab:
        return "the model reads no tokens"
    if _is_entangled(model):
        return "it computes layers one by one, which a state or values of other layers forbid"
    names = gptq_names(storages)
    needed = _memory(model, names, tokens)
    if needed > free:
        has = f"{free / 2**30:.1f} are free"
        return f"GPTQ needs {needed / 2**30:.1f} GiB of memory, {has}"
    seconds = _seconds(model, names, tokens)
    if spec.quantization.method == "auto" and seconds > MAX_SECONDS:
        which = 'quantization.method = "gptq" requests it, "mse" avoids it'
        return f"GPTQ would take some {seconds / 60:.0f} minutes, once ({which})"
    return None


def _seconds(model: AbstractModel, names: list[str], tokens: int) -> float:
    """Estimate the seconds that GPTQ takes on this machine."""
    shapes = parameter_shapes(model)
    fed = sum(prod(shapes[name]) for name in names)
    return fed * (PER_WEIGHT["gptq"] + PER_PRODUCT * tokens) / min(cores(), _CORES)


def _memory(model: AbstractModel, names: list[str], tokens: int) -> int:
    """Estimate the bytes of memory for generating texts, and for quantizing layers.

    The latter is three times the largest layer, the products of its inputs, a factor of the largest
    of these for each of four threads, and the vectors between two layers.
    """
    shapes = parameter_shapes(model)
    weights = sum(map(prod, shapes.values()))
    cache = sum(shape.elements() for shape in model.caches.values())
    layers, widest = Counter[str](), 0
    for name in names:
        *stack, outputs, inputs = shapes[name]
        layer = ".".join(name.split(".")[:2])
        layers[layer] += 4 * prod(stack) * (3 * outputs * inputs + inputs * inputs)
        widest = max(widest, inputs)
    largest = max(layers.values(), default=0)
    return max(
        weights * 17 // 16 + 2 * cache * AT_ONCE * LENGTH,
        largest + 4 * 3 * 8 * widest**2 + 2 * 4 * tokens * widest,
    )


def same_arrays(
    model: AbstractModel,
    origins: Mapping[str, Source],
    storages: Mapping[str, Storage],
) -> dict[str, str]:
    """Map the name of each parameter to the first parameter that is the same array."""
    shapes = parameter_shapes(model)
    dtypes = dict(zip(model.names, (p.dtype for p in model.parameters), strict=True))
    sources = {
        name: (origin.source(shapes), dtypes[name], name in model.normalized, storages.get(name))
        for name, origin in origins.items()
    }
    firsts = {source: name for name, source in reversed(sources.items())}
    return {name: firsts[source] for name, source in sources.items()}


@dataclass(frozen=True)
class WeightPlan:
    """The origins and formats of a model's weights, none of which has been read yet.

    Attributes:
        plain: the model with plain parameters.
        spec: its specification.
        checkpoint: its tensors.
        origins: name of each parameter -> its tensors.
        storages: name of each parameter to be quantized -> its format and method; empty for a
            native checkpoint, which stores the final format.
        activations: how products with quantized weights round activations on a CPU.
        kv_cache: the type of the KV cache, for which queries and keys may be equalized.
        free_memory: returns the bytes that GPTQ may use; None: no limit.
        scales: name of each parameter to be scaled on loading -> its scale.
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
        """The model with its parameters in their final formats."""

        def loaded(name: str, parameter: Any) -> Any:
            origin, storage = self.origins[name], self.storages.get(name)
            if isinstance(origin, NativeOrigin):
                return origin.loaded
            return parameter if storage is None else storage.abstract(parameter.shape)

        parameters = map(loaded, self.plain.names, self.plain.parameters)
        return replace(self.plain, parameters=tuple(parameters))

    @cached_property
    def same(self) -> dict[str, str]:
        """Map the name of each parameter to the first parameter that is the same array."""
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
    """Plan a model's weights.

    Args:
        model: a model whose parameters are all plain.
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
    """Plan the same weights for a native checkpoint. Raises as `plan_weights`."""
    plain, origins = native_origins(plan.plain, plan.spec, checkpoint, plan.activations)
    return replace(plan, plain=plain, checkpoint=checkpoint, origins=origins, storages={})

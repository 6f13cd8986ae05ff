"""Stage model: the model that each device of a pipeline stage runs, and its parameters' origins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax.typing import DTypeLike

from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.abstract_model import AbstractModel, build_abstract_model
from jinfer.parallel.layer_plan import ModelSlice, stage_spec
from jinfer.parallel.shard_params import (
    abstract_shard,
    check_quant_blocks,
    parameter_sharding,
    quant_block,
)
from jinfer.parallel.shard_sizes import AxisSharding, ShardingError
from jinfer.parallel.sharding_rules import ModuleShardings, shard_spec


@dataclass(frozen=True)
class ParameterSource:
    """Where a parameter of a stage comes from.

    Attributes:
        name: the whole model's name of it.
        shape: its shape in the whole model.
        shardings: how its axes are divided among the devices.
        first_only: whether it is added to partial sums, so that only the first device may have it.
    """

    name: str
    shape: tuple[int, ...]
    shardings: Mapping[int, AxisSharding]
    first_only: bool


@dataclass(frozen=True)
class StageModel:
    """A pipeline stage as each of its devices has it.

    Attributes:
        slice: the slice of the whole model that the stage has.
        devices: how many devices its layers are divided among (tensor parallelism).
        model: the model of one device, with the shapes of its shards.
        sources: where the model's parameters come from, in the order of its names.
    """

    slice: ModelSlice
    devices: int
    model: AbstractModel
    sources: tuple[ParameterSource, ...]


def make_stage_model(
    spec: ModelSpec, whole: AbstractModel, part: ModelSlice, devices: int, dtype: DTypeLike
) -> StageModel:
    """The model of a pipeline stage.

    Args:
        whole: the whole model, with its parameters as they will be stored.
        dtype: dtype of the computation.

    Raises:
        ShardingError: a block or parameter cannot be divided among the devices.
    """
    stored = dict(zip(whole.names, whole.parameters, strict=True))
    shift = {stack: layers.start for stack, layers in part.layers.items()}

    def unit(module: str) -> int:
        name = whole_name(module, shift)
        own = ("weight", "down.weight", "experts.down.weight")
        weights = (stored.get(f"{name}.{weight}") for weight in own)
        return max(quant_block(weight) for weight in weights if weight is not None)

    local_spec, shares = shard_spec(stage_spec(spec, part), devices, unit)
    model = build_abstract_model(local_spec, dtype, adapters=whole.modules.adapters)
    modules = {name: _sharded_module(name, shares) for name in model.names}
    axes = dict(zip(model.names, model.axes, strict=True))
    sources, parameters = list[ParameterSource](), list[Any]()
    for name, logical_axes in axes.items():
        parameter = stored[whole_name(name, shift)]
        of_module = shares.get(modules[name], {})
        sharding = parameter_sharding(parameter.shape, logical_axes, of_module)
        _check_parameter(name, parameter, sharding, of_module)
        parameters.append(abstract_shard(parameter, sharding))
        shape, first_only = tuple(parameter.shape), _is_added_once(name, axes, of_module)
        sources.append(ParameterSource(whole_name(name, shift), shape, sharding, first_only))
    model = replace(model, parameters=tuple(parameters), never=whole.never)
    return StageModel(part, devices, model, tuple(sources))


def whole_name(name: str, shift: Mapping[str, int]) -> str:
    """The whole model's name of a stage's parameter or module.

    "decoder.0.attn" of a stage that begins with layer 8 is "decoder.8.attn".

    Args:
        shift: the first layer of each stack that the stage has.
    """
    stack, *rest = name.split(".")
    if stack in shift and rest and rest[0].isdigit():
        rest[0] = str(int(rest[0]) + shift[stack])
    return ".".join([stack, *rest])


def _sharded_module(name: str, shares: ModuleShardings) -> str:
    """The divided module that a parameter belongs to; "" where there is none."""
    words = name.split(".")
    prefixes = (".".join(words[:end]) for end in range(len(words), 0, -1))
    return next((prefix for prefix in prefixes if prefix in shares), "")


def _check_parameter(
    name: str,
    parameter: Any,
    cut_by: Mapping[int, AxisSharding],
    of_module: Mapping[str, AxisSharding],
) -> None:
    """Raises `ShardingError` where quantization blocks would be split or mixed with padding."""
    try:
        check_quant_blocks(parameter, cut_by)
    except ShardingError as error:
        raise ShardingError(f"{name}: {error}; take fewer devices, or smaller blocks") from None
    last = cut_by.get(len(parameter.shape) - 1)
    keys, unit = of_module.get("kv_heads"), quant_block(parameter)
    if last is None or keys is None or keys.total >= len(last.counts):
        return
    # Heads of padding read real keys and values here, so their columns have to be whole blocks of
    # zeros.
    if any(count < last.size and count % unit for count in last.counts):
        raise ShardingError(f"{name}: its heads do not divide, and blocks of {unit} are wider")


def _is_added_once(
    name: str, axes: Mapping[str, tuple[str, ...]], of_module: Mapping[str, AxisSharding]
) -> bool:
    """Whether a parameter is the bias of a row-parallel projection, to be added only once."""
    if not name.endswith(".bias"):
        return False
    weight = axes.get(name.removesuffix("bias") + "weight", ())
    return weight[-1:] != () and weight[-1] in of_module and axes[name][-1] not in of_module

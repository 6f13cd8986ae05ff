"""What a stage's devices have of a model: modules, parameters, and where these come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax.typing import DTypeLike

from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.abstract_model import AbstractModel, build
from jinfer.parallel.shard_params import abstract_part, block_of, check_blocks, shares_of
from jinfer.parallel.shard_sizes import Share, ShareError
from jinfer.parallel.sharding_rules import Part, Shares, divided, stage_spec


@dataclass(frozen=True)
class Source:
    """Where a parameter of a stage comes from.

    Attributes:
        name: of the whole model's parameter.
        shape: its shape there.
        shares: which part of it each device has, by axis.
        once: it is added to a sum of all devices' parts, so one device alone has it.
    """

    name: str
    shape: tuple[int, ...]
    shares: Mapping[int, Share]
    once: bool


@dataclass(frozen=True)
class StageModel:
    """A stage as each of its devices has it.

    Attributes:
        part: what it has of the whole model.
        devices: among how many its layers are divided.
        model: with names and shapes of one device.
        sources: of the model's parameters, in the order of its names.
    """

    part: Part
    devices: int
    model: AbstractModel
    sources: tuple[Source, ...]


def stage_model(
    spec: ModelSpec, whole: AbstractModel, part: Part, devices: int, dtype: DTypeLike
) -> StageModel:
    """A stage of a model.

    Args:
        whole: the model, its parameters as they will be stored.
        dtype: of the computation.

    Raises:
        ShareError: something cannot be divided among the devices.
    """
    stored = dict(zip(whole.names, whole.parameters, strict=True))
    shift = {stack: layers.start for stack, layers in part.layers.items()}

    def unit(module: str) -> int:
        name = whole_name(module, shift)
        found = (stored.get(f"{name}.{down}.weight") for down in ("down", "experts.down"))
        return max(block_of(each) for each in found if each is not None)

    local_spec, shares = divided(stage_spec(spec, part), devices, unit)
    model = build(local_spec, dtype)
    owners = {name: _module_of(name, shares) for name in model.names}
    axes = dict(zip(model.names, model.axes, strict=True))
    sources, parameters = list[Source](), list[Any]()
    for name, own in axes.items():
        parameter = stored[whole_name(name, shift)]
        of_module = shares.get(owners[name], {})
        cut_by = shares_of(parameter.shape, own, of_module)
        _check(name, parameter, cut_by, of_module)
        parameters.append(abstract_part(parameter, cut_by))
        shape, once = tuple(parameter.shape), _is_once(name, axes, of_module)
        sources.append(Source(whole_name(name, shift), shape, cut_by, once))
    model = replace(model, parameters=tuple(parameters), never=whole.never)
    return StageModel(part, devices, model, tuple(sources))


def whole_name(name: str, shift: Mapping[str, int]) -> str:
    """The whole model's name for a stage's: "decoder.0.attn" of a later stage is "decoder.8.attn".

    Args:
        shift: the first layer of each stack that the stage has.
    """
    stack, *rest = name.split(".")
    if stack in shift and rest and rest[0].isdigit():
        rest[0] = str(int(rest[0]) + shift[stack])
    return ".".join([stack, *rest])


def _module_of(name: str, shares: Shares) -> str:
    """The divided module that a parameter belongs to; "" where there is none."""
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in shares), "")


def _check(
    name: str, parameter: Any, cut_by: Mapping[int, Share], of_module: Mapping[str, Share]
) -> None:
    """Raises `ShareError` where quantized blocks would be torn apart, or mixed with padding."""
    try:
        check_blocks(parameter, cut_by)
    except ShareError as error:
        raise ShareError(f"{name}: {error}; take fewer devices, or smaller blocks") from None
    last = cut_by.get(len(parameter.shape) - 1)
    keys, unit = of_module.get("kv_heads"), block_of(parameter)
    if last is None or keys is None or keys.total >= len(last.counts):
        return
    # A head of padding reads real values here, so its columns have to be blocks of zeros.
    if any(count < last.size and count % unit for count in last.counts):
        raise ShareError(f"{name}: its heads do not divide, and blocks of {unit} are wider")


def _is_once(
    name: str, axes: Mapping[str, tuple[str, ...]], of_module: Mapping[str, Share]
) -> bool:
    """Whether a parameter is the bias of a projection whose inputs are divided."""
    if not name.endswith(".bias"):
        return False
    weight = axes.get(name.removesuffix("bias") + "weight", ())
    return weight[-1:] != () and weight[-1] in of_module and axes[name][-1] not in of_module

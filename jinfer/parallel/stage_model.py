"""Stage model: the model that each device of a pipeline stage runs, and its parameters' origins.

The forward passes of a stage are pure functions that each of its devices runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jinfer.engine.runner.flat_batch import FlatBatch
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.abstract_model import AbstractModel, Want, build_abstract_model
from jinfer.nn.forward_context import ForwardBatch
from jinfer.nn.row_edits import IMAGES
from jinfer.nn.transformer_layer import HiddenState
from jinfer.ops.attention.kv_cache import Cache
from jinfer.parallel.device_groups import DeviceGroup
from jinfer.parallel.layer_plan import ModelSlice, stage_spec
from jinfer.parallel.shard_params import abstract_shard, check_quant_blocks, quant_block
from jinfer.parallel.sharding_rules import (
    AxisSharding,
    ModuleShardings,
    ShardingError,
    in_elements,
    shard_spec,
)

if TYPE_CHECKING:
    from jaxtyping import Int

    from jinfer.nn.transformer import Model

type StageResults = dict[str, Array]


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

    @property
    def axis(self) -> int | None:
        """The axis along which the devices' shards differ; None: all devices have the same."""
        return 0 if self.first_only else min(self.shardings, default=None)


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

    def module(self, leaves: tuple[Array, ...]) -> Model:
        """Builds the model with these parameters, flattened."""
        tree = jax.tree.structure(self.model.parameters)
        return self.model.module(jax.tree.unflatten(tree, leaves))


@dataclass(frozen=True)
class PipelineStage:
    """A pipeline stage on its devices.

    Attributes:
        model: the model that each of its devices runs.
        device_group: its devices.
        leaves: its parameters' place among the flattened parameters of all stages.
        streamed: whether its weights are offloaded to host memory.
        host: the host's device, where some of its KV cache is; None: all is on `device_group`.
    """

    model: StageModel
    device_group: DeviceGroup
    leaves: slice
    streamed: bool = False
    host: DeviceGroup | None = None

    @cached_property
    def kind(self) -> str:
        """A key that is equal for stages with the same programs."""
        model_slice, where = self.model.slice, (self.device_group.devices, self.host)
        return repr((where, model_slice.first, model_slice.last, self.model.model.described()))

    @cached_property
    def abstract_leaves(self) -> tuple[Any, ...]:
        """Its abstract parameters, flattened, with their shardings."""
        parameters = zip(self.model.model.parameters, self.model.sources, strict=True)
        group = self.device_group
        return tuple(jax.tree.leaves([group.abstract(each, s.axis) for each, s in parameters]))


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
        name = _whole_name(module, shift)
        own = ("weight", "down.weight", "experts.down.weight")
        weights = (stored.get(f"{name}.{weight}") for weight in own)
        return max(quant_block(weight) for weight in weights if weight is not None)

    local_spec, shardings = shard_spec(stage_spec(spec, part), devices, unit)
    model = build_abstract_model(local_spec, dtype, adapters=whole.modules.adapters)
    axes = dict(zip(model.names, model.axes, strict=True))
    sources, parameters = list[ParameterSource](), list[Any]()
    for name, logical_axes in axes.items():
        whole_name = _whole_name(name, shift)
        parameter, of_module = stored[whole_name], _of_module(name, shardings)
        sharding = {
            axis: in_elements(of_module[logical], parameter.shape[axis])
            for axis, logical in enumerate(logical_axes)
            if logical in of_module
        }
        _check_parameter(name, parameter, sharding, of_module)
        parameters.append(abstract_shard(parameter, sharding))
        shape, first_only = tuple(parameter.shape), _is_added_once(name, axes, of_module)
        sources.append(ParameterSource(whole_name, shape, sharding, first_only))
    model = replace(model, parameters=tuple(parameters), never=whole.never)
    return StageModel(part, devices, model, tuple(sources))


def _whole_name(name: str, shift: Mapping[str, int]) -> str:
    """The whole model's name of a stage's parameter or module.

    "decoder.0.attn" of a stage that begins with layer 8 is "decoder.8.attn".

    Args:
        shift: the first layer of each stack that the stage has.
    """
    stack, *rest = name.split(".")
    if stack in shift and rest and rest[0].isdigit():
        rest[0] = str(int(rest[0]) + shift[stack])
    return ".".join([stack, *rest])


def _of_module(name: str, shardings: ModuleShardings) -> Mapping[str, AxisSharding]:
    """How the axes of the divided module that a parameter belongs to are divided."""
    words = name.split(".")
    prefixes = (".".join(words[:end]) for end in range(len(words), 0, -1))
    return next((shardings[prefix] for prefix in prefixes if prefix in shardings), {})


def _check_parameter(
    name: str,
    parameter: Any,
    sharding: Mapping[int, AxisSharding],
    of_module: Mapping[str, AxisSharding],
) -> None:
    """Raises `ShardingError` where quantization blocks would be split or mixed with padding."""
    try:
        check_quant_blocks(parameter, sharding)
    except ShardingError as error:
        raise ShardingError(f"{name}: {error}; take fewer devices, or smaller blocks") from None
    last = sharding.get(len(parameter.shape) - 1)
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


def decoder_forward(
    stage: StageModel,
    wants: Sequence[Want],
    drafted: bool,
    leaves: tuple[Array, ...],
    cache: Cache,
    given: HiddenState | None,
    batch: FlatBatch,
    last: Int[Array, " chosen"] | None,
) -> tuple[Cache, HiddenState | StageResults]:
    """The forward pass of a decoder stage over a flat batch.

    Args:
        wants: the results that the last stage returns.
        drafted: whether tokens may be rejected: `verify.accept_states` has to follow.
        leaves: the stage's parameters, flattened.
        given: hidden states from the previous stage; None for the first stage.
        last: indices of the tokens whose results are wanted; None: all.

    Returns:
        The KV cache; hidden states for the next stage, or the last stage's results by name.
    """
    module, at = stage.module(leaves), batch.step()
    at = at.with_draft_runs() if drafted else at
    stack, tokens = module.stacks["decoder"], batch.tokens
    if given is None:
        given = stack.embed(tokens[None], jnp.zeros_like(tokens)[None], at, module.shared)
    state, cache = stack.run_layers(given, tokens[None], at, cache, module.shared)
    if not stage.slice.last:
        return cache, state
    if last is not None:
        state = jax.tree.map(lambda each: each[:, jnp.maximum(last, 0)], state)
    results = stack.results(state, at, module.shared)
    return cache, {want: results[want][0] for want in wants}


def with_own_images(batch: FlatBatch, stage: PipelineStage) -> FlatBatch:
    """A flat batch with the features that enter in a stage, by its own numbers of layers."""
    images: Any = batch.tables.get(IMAGES)
    if images is None:
        return batch
    part = stage.model.slice
    layers = part.layers["decoder"]
    names = {f"decoder.{layer}.x": f"decoder.{layer - layers.start}.x" for layer in layers}
    before = [name for name in images.edits if not name.endswith(".x")]
    names |= dict(zip(before, before, strict=True)) if part.first else {}
    edits = {names[name]: edit for name, edit in images.edits.items() if name in names}
    return batch._replace(tables={**batch.tables, IMAGES: images._replace(edits=edits)})


def encoder_forward(
    stage: StageModel,
    wants: Sequence[Want],
    leaves: tuple[Array, ...],
    given: HiddenState | None,
    tokens: Int[Array, "batch tokens"],
    types: Int[Array, "batch tokens"],
    lengths: Int[Array, " batch"],
) -> HiddenState | StageResults:
    """The forward pass of an encoder stage over whole texts; arguments as of `decoder_forward`.

    Args:
        types: token type ids.
        lengths: tokens of each text without padding.
    """
    module, at = stage.module(leaves), ForwardBatch.of_texts(tokens, lengths)
    stack = module.stacks["encoder"]
    if given is None:
        given = stack.embed(tokens, types, at, module.shared)
    state, _ = stack.run_layers(given, tokens, at, {}, module.shared)
    if not stage.slice.last:
        return state
    results = stack.results(state, at, module.shared)
    return {want: results[want] for want in wants}

"""Sharding rules: tensor parallelism of each block, and the specification of one device's shard.

Attention is divided by heads (column parallel in q, k, v; row parallel in the output projection),
feed-forwards and experts by columns of the inner width, the embedding and the head by vocabulary
(Megatron-LM, Shoeybi et al. 2019). What no rule names is replicated. Each layer then needs an
all-reduce after the attention and one after the feed-forward.

A recurrence is divided by its heads or channels, and with it the modules of the formula that its
inputs and its output go through: linear projections of replicated values are column-parallel,
convolutions, activations and norms take a part each (a norm over all channels adds its sums of
squares over devices), and the linear projection that ends it is row-parallel, its sum an
all-reduce. Values are followed through the layer's formula. A module that meets a value of another
origin stays replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeGuard

from jinfer.modelspec import (
    attention_blocks,
    blocks,
    feed_forward_blocks,
    position_blocks,
    recurrent_blocks,
)
from jinfer.modelspec.block import Block
from jinfer.modelspec.layer_spec import LayerSpec
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.positions import alibi_slopes
from jinfer.nn.tensor_parallel import (
    ColumnLinearBlock,
    RowLinearBlock,
    ShardedAlibi,
    ShardedEmbeddingBlock,
    ShardedHeadBlock,
    ShardedRMSBlock,
)

TENSOR_AXIS = "tensor"  # the mesh axis over which tensor parallelism divides


class ShardingError(ValueError):
    """Something cannot be divided among so many devices; the message says what."""


@dataclass(frozen=True)
class AxisSharding:
    """An axis divided into shards of equal size, some of which end in padding with zeros.

    Attributes:
        total: units on the axis.
        size: units in a shard, with padding.
        starts: the first unit of each shard.
        counts: units of each shard without padding.
    """

    total: int
    size: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def padding(self) -> int:
        """Units of padding in all shards together."""
        return self.size * len(self.counts) - sum(self.counts)


def shard_evenly(total: int, devices: int, unit: int = 1) -> AxisSharding:
    """Consecutive shards whose size is a multiple of `unit`."""
    size = -(-total // (unit * devices)) * unit
    starts = tuple(min(shard * size, total) for shard in range(devices))
    return AxisSharding(total, size, starts, tuple(min(size, total - start) for start in starts))


def shard_heads(query: int, key: int, devices: int) -> tuple[AxisSharding, AxisSharding]:
    """The shards of the query heads, and of the key and value heads that they read (GQA).

    Where there are fewer key and value heads than devices, each is replicated on several.

    Raises:
        ShardingError: there are more devices than heads, or neither of the number of key and value
            heads and the number of devices divides the other.
    """
    if devices > query:
        raise ShardingError(f"{query} heads cannot be divided among {devices} devices")
    group = query // key
    if key >= devices:
        kv_heads = shard_evenly(key, devices)
        return _in_smaller_units(kv_heads, group), kv_heads
    if devices % key:
        raise ShardingError(
            f"{key} key and value heads do not divide among {devices} devices; "
            f"take {key} or a multiple of it"
        )
    among = devices // key
    within = shard_evenly(group, among)
    starts = tuple(
        head * group + within.starts[part] for head in range(key) for part in range(among)
    )
    query_heads = AxisSharding(query, within.size, starts, within.counts * key)
    owners = tuple(device // among for device in range(devices))
    return query_heads, AxisSharding(key, 1, owners, (1,) * devices)


def _in_smaller_units(sharding: AxisSharding, each: int) -> AxisSharding:
    """The same sharding counted in smaller units, `each` of which make one."""
    starts, counts = (
        tuple(n * each for n in units) for units in (sharding.starts, sharding.counts)
    )
    return AxisSharding(sharding.total * each, sharding.size * each, starts, counts)


def in_elements(sharding: AxisSharding, elements: int) -> AxisSharding:
    """The same sharding counted in elements of an axis, equally many per unit."""
    return _in_smaller_units(sharding, elements // sharding.total)


type BlockShardings = dict[str, AxisSharding]  # logical axis -> how it is divided
type ModuleShardings = dict[str, BlockShardings]  # by module

# The logical axes of attentions, feed-forwards, embeddings and heads that are divided. Those of
# modules around a recurrence are in `_RULES`; all others are replicated.
SHARDED_AXES = ("heads", "kv_heads", "mlp", "vocab")


# Recurrences: the logical axis of their parameters, the field with its units, and other fields of
# which each device has a part as well.
_CHANNELS = "channels", "width"
_RECURRENT: Mapping[type[Block], tuple[str, ...]] = {
    recurrent_blocks.ConvSpec: ("channels", "size"),
    recurrent_blocks.SSMSpec: ("ssm_heads", "heads", "width"),
    recurrent_blocks.DeltaSpec: ("delta_heads", "heads", "key_heads"),
    recurrent_blocks.SelectiveScanSpec: _CHANNELS,
    recurrent_blocks.RGLRUSpec: _CHANNELS,
    recurrent_blocks.WKVSpec: _CHANNELS,
}
# The same of other blocks that may be divided together with a recurrence.
_AROUND: Mapping[type[Block], tuple[str, ...]] = {
    blocks.RMSNormSpec: ("hidden", "groups", "size"),
    blocks.BlockLinearSpec: ("blocks", "blocks", "inputs", "outputs"),
}
_RULES = {**_RECURRENT, **_AROUND}


def shard_spec(
    spec: ModelSpec, devices: int, unit: Callable[[str], int]
) -> tuple[ModelSpec, ModuleShardings]:
    """Tensor parallelism: the specification of one device's shard, equal for all devices.

    Args:
        unit: the name of a feed-forward, or of a linear projection by its inputs -> how many of its
            columns have to stay together.

    Returns:
        The specification, and how each module's logical axes are divided.

    Raises:
        ShardingError: a block cannot be divided among so many devices.
    """
    shardings: ModuleShardings = {}
    if devices == 1:
        return spec, shardings
    vocab = spec.dims.get("vocab", 0)
    outside = {name for stack in spec.stacks for name in (*stack.stem.calls, *stack.head.calls)}

    def shard(name: str, block: Block, is_outside: bool = False) -> Any:
        try:
            if is_outside and block.gives_partial_sums():
                # Only layers all-reduce the partial sums of such a module.
                raise ShardingError("is called before or after the layers; divide by layers")
            local, axes = _shard_block(block, devices, vocab, lambda: unit(name))
        except ShardingError as error:
            raise ShardingError(f"{name}: {error}") from None
        if axes:
            shardings[name] = axes
        return local

    def shard_all(prefix: str, modules: Iterable[tuple[str, Block]]) -> tuple[Any, ...]:
        return tuple((n, shard(prefix + n, block, n in outside)) for n, block in modules)

    def shard_layer(prefix: str, layer: LayerSpec, carried: Collection[str]) -> LayerSpec:
        own = divided_modules(layer, devices, lambda name: unit(prefix + name), carried)
        shardings.update({prefix + name: axes for name, (_, axes) in own.items() if axes})
        modules = tuple(
            (n, own[n][0] if n in own else shard(prefix + n, block)) for n, block in layer.modules
        )
        return LayerSpec(layer.wiring, modules, axis=TENSOR_AXIS)

    stacks = tuple(
        replace(
            stack,
            modules=shard_all(f"{stack.name}.", stack.modules),
            layers=tuple(
                shard_layer(f"{stack.name}.{i}.", layer, stack.carried)
                for i, layer in enumerate(stack.layers)
            ),
        )
        for stack in spec.stacks
    )
    return replace(spec, shared=shard_all("", spec.shared), stacks=stacks), shardings


def _shard_block(
    block: Any, devices: int, vocab: int, unit: Callable[[], int]
) -> tuple[Any, BlockShardings]:
    """One device's block, smaller along its logical axes, and how these are divided."""
    named = {axis: field for axis, field in block.axes().items() if axis in SHARDED_AXES}
    sizes = {axis: getattr(block, field) for axis, field in named.items()}
    # Other tables than the vocabulary's are read by every device.
    if not sizes or sizes.get("vocab", vocab) != vocab:
        return block, {}
    if reason := block.undividable():
        raise ShardingError(reason)
    axes = {a: shard_evenly(n, devices, unit() if a == "mlp" else 1) for a, n in sizes.items()}
    if "heads" in sizes:
        keys = sizes.get("kv_heads", sizes["heads"])
        by_heads = zip(
            ("heads", "kv_heads"), shard_heads(sizes["heads"], keys, devices), strict=True
        )
        axes |= {axis: sharding for axis, sharding in by_heads if axis in sizes}
    plain = not getattr(block, "gated", isinstance(block, feed_forward_blocks.GatedMLPSpec))
    if "mlp" in axes and axes["mlp"].padding and plain and block.activation == "sigmoid":
        raise ShardingError(
            f"its width of {sizes['mlp']} does not divide among {devices} devices, and the sigmoid "
            "of padding is not 0; take other numbers of devices"
        )
    local: Any = replace(block, **{field: axes[axis].size for axis, field in named.items()})
    match block:
        case blocks.EmbeddingSpec():
            local = ShardedEmbeddingBlock(**_fields(local), axis=TENSOR_AXIS)
        case blocks.HeadSpec():
            local = ShardedHeadBlock(**_fields(local), axis=TENSOR_AXIS, whole=block.outputs)
        case attention_blocks.AttentionSpec(position=position_blocks.AlibiSpec() as alibi):
            heads, slopes = axes["heads"], alibi_slopes(block.heads, alibi).tolist()
            by_device = tuple(
                (*slopes[start : start + count], *(0.0,) * (heads.size - count))
                for start, count in zip(heads.starts, heads.counts, strict=True)
            )
            position = ShardedAlibi(**_fields(alibi), axis=TENSOR_AXIS, slopes=by_device)
            local = replace(local, position=position)
    return local, axes


def _fields(block: Any) -> dict[str, Any]:
    return {field.name: getattr(block, field.name) for field in fields(block)}


@dataclass(frozen=True)
class _Value:
    """A value of the formula: the modules whose outputs it consists of.

    Attributes:
        whole: whether it consists of something else, too, such as the layer's input.
    """

    modules: frozenset[str]
    whole: bool = False

    def _with(self, other: Any) -> _Value:
        if not isinstance(other, _Value):
            return self
        return _Value(self.modules | other.modules, self.whole or other.whole)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _with
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _with

    def __getitem__(self, part: Any) -> _Value:
        """A part of a vector, which is not that of a device."""
        return _Value(self.modules, whole=True)

    def __neg__(self) -> _Value:
        return self

    __pos__ = __neg__


def divided_modules(
    layer: LayerSpec,
    devices: int,
    unit: Callable[[str], int],
    carried: Collection[str],
) -> dict[str, tuple[Block, BlockShardings]]:
    """The modules that are divided with a layer's recurrences, and how their axes are.

    Args:
        unit: the name of a module -> how many columns of its weight have to stay together.
        carried: names of values that other layers read.
    """
    own = dict(layer.modules)
    if not _has_recurrence(own):
        return {}
    calls, results = _calls(layer, carried)
    chosen = {
        name: own[name]
        for name in calls
        if name in own and isinstance(own[name], (blocks.LinearSpec, *_RULES))
    }
    while (refused := _refused(chosen, calls, results, devices, unit)) is not None:
        del chosen[refused]
    if not _has_recurrence(chosen):
        return {}
    outputs = _outputs(chosen, calls)
    return {name: _local(block, devices, name in outputs) for name, block in chosen.items()}


def _has_recurrence(modules: Mapping[str, Block]) -> bool:
    return any(type(block) in _RECURRENT for block in modules.values())


def _calls(
    layer: LayerSpec, carried: Collection[str]
) -> tuple[dict[str, list[_Value]], list[_Value]]:
    """The arguments of each module, of all its calls, and the values that leave the layer."""
    calls: dict[str, list[_Value]] = {}
    own = dict(layer.modules)

    def call(name: str, arguments: list[Any]) -> _Value:
        if isinstance(own.get(name), feed_forward_blocks.ActivationSpec):  # of each number alone
            value: _Value = arguments[0]
            return value
        calls.setdefault(name, []).extend(a for a in arguments if isinstance(a, _Value))
        return _Value(frozenset((name,)))

    names = ("tokens", "positions", "encoded", "x", *layer.wiring.takes)
    inputs = {name: _Value(frozenset(), whole=True) for name in names}
    value, assigned = layer.wiring.run(inputs, call)
    return calls, [value, *(assigned[name] for name in assigned if name in carried)]


def _divides(name: str, block: Block, devices: int, ends: bool, unit: Callable[[str], int]) -> bool:
    """Whether the sizes of a module divide; `ends`: of a projection, whether by its inputs."""
    if _is_linear(block):
        if not ends:
            return block.outputs % devices == 0
        return block.inputs % devices == 0 and block.inputs // devices % unit(name) == 0
    if isinstance(block, recurrent_blocks.SSMSpec) and block.groups != 1 and block.groups % devices:
        return False
    if isinstance(block, blocks.RMSNormSpec) and block.groups == 1:
        return block.size % devices == 0
    return all(getattr(block, field) % devices == 0 for field in _RULES[type(block)][1:])


def _outputs(chosen: Mapping[str, Block], calls: Mapping[str, list[_Value]]) -> set[str]:
    """The chosen modules whose outputs are divided: all but linear projections that end."""
    found: set[str] = set()
    while True:
        more = {
            name
            for name, block in chosen.items()
            if not _is_linear(block) or not any(value.modules & found for value in calls[name])
        }
        if more == found:
            return found
        found = more


def _refused(
    chosen: Mapping[str, Block],
    calls: Mapping[str, list[_Value]],
    results: Iterable[_Value],
    devices: int,
    unit: Callable[[str], int],
) -> str | None:
    """A module that cannot be divided, as the others are; None: all can."""
    outputs = _outputs(chosen, calls)

    def lower(value: _Value) -> list[str]:
        """Projections before those whose sums are in a value: they are better left whole."""
        sums = [] if value.whole else (value.modules & chosen.keys()) - outputs
        before = {part for one in sums for given in calls[one] for part in given.modules & outputs}
        return sorted(part for part in before if _is_linear(chosen[part]))

    for name in (name for name in calls if name in outputs and not _is_linear(chosen[name])):
        for number, value in enumerate(calls[name]):
            if not (value.modules & outputs or _takes_whole(chosen[name], number, devices)):
                is_norm = isinstance(chosen[name], blocks.RMSNormSpec)
                return name if is_norm else [*lower(value), name][0]
    for name, block in chosen.items():
        if not _divides(name, block, devices, name not in outputs, unit):
            return name
    for name, arguments in calls.items():
        taker = chosen.get(name)
        for number, value in enumerate(arguments):
            parts = sorted(value.modules & outputs)
            if parts and (value.whole or len(parts) < len(value.modules)):
                return [*lower(value), *parts][0]
            if parts and (taker is None or _takes_whole(taker, number, devices)):
                return parts[0]
    return min((part for value in results for part in value.modules & outputs), default=None)


def _is_linear(block: Block) -> TypeGuard[blocks.LinearSpec]:
    return isinstance(block, blocks.LinearSpec)


def _takes_whole(block: Block, argument: int, devices: int) -> bool:
    """Whether every device needs the whole of an argument: what heads or channels share."""
    if isinstance(block, recurrent_blocks.SelectiveScanSpec):
        return argument in (1, 2)
    return (
        isinstance(block, recurrent_blocks.SSMSpec)
        and block.groups % devices != 0
        and argument in (1, 2)
    )


def _local(block: Block, devices: int, gives_parts: bool) -> tuple[Block, BlockShardings]:
    """One device's block, and how its parameters' axes are divided."""
    if _is_linear(block):
        whole = block.outputs if gives_parts else block.inputs
        shares = {"part": shard_evenly(whole, devices)}
        made: Any = ColumnLinearBlock if gives_parts else RowLinearBlock
        field = "outputs" if gives_parts else "inputs"
        return made(**(vars(block) | {field: whole // devices})), shares
    axis, *sizes = _RULES[type(block)]
    changed = {field: getattr(block, field) // devices for field in sizes}
    if isinstance(block, recurrent_blocks.SSMSpec) and block.groups % devices == 0:
        changed["groups"] = block.groups // devices
    if isinstance(block, blocks.RMSNormSpec) and block.groups == 1:
        size = block.size // devices
        of_all: Any = vars(block) | {"size": size, "whole": block.size, "axis": TENSOR_AXIS}
        return ShardedRMSBlock(**of_all), {"hidden": shard_evenly(block.size, devices)}
    if getattr(block, "shared", False):
        return replace(block, **changed), {}
    return replace(block, **changed), {axis: shard_evenly(getattr(block, sizes[0]), devices)}

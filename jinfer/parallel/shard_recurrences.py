"""Tensor parallelism of layers with a state: which modules around a recurrence can be divided.

A recurrence is divided by its heads or channels, and with it the modules of the formula that its
inputs and its output go through: linear projections of what every device has are column-parallel,
convolutions, activations and norms take a part each (a norm over all channels adds its sums of
squares over devices), and the linear projection that ends it is row-parallel, its sum an
all-reduce. Values are followed through the layer's formula. What meets something else that needs
the whole stays replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from jinfer.modelspec import blocks, feed_forward_blocks, recurrent_blocks
from jinfer.modelspec.block import Block
from jinfer.modelspec.layer_spec import LayerSpec
from jinfer.nn.tensor_parallel import ColumnLinearBlock, RowLinearBlock, ShardedRMSBlock
from jinfer.parallel.shard_sizes import AxisSharding, shard_evenly


@dataclass(frozen=True)
class _Rule:
    """How a kind of module is divided.

    Attributes:
        counts: fields that the number of devices has to divide.
        sizes: fields of which each device has a part.
        axis: logical axis of its parameters.
        total: field with the number of units on that axis.
    """

    counts: tuple[str, ...]
    sizes: tuple[str, ...]
    axis: str
    total: str


_CHANNELS = _Rule(("width",), ("width",), "channels", "width")
_RULES: Mapping[type[Block], _Rule] = {
    blocks.RMSNormSpec: _Rule(("groups",), ("size", "groups"), "hidden", "groups"),
    blocks.BlockLinearSpec: _Rule(("blocks",), ("blocks", "inputs", "outputs"), "blocks", "blocks"),
    recurrent_blocks.ConvSpec: _Rule(("size",), ("size",), "channels", "size"),
    recurrent_blocks.SSMSpec: _Rule(("heads",), ("width", "heads"), "ssm_heads", "heads"),
    recurrent_blocks.DeltaSpec: _Rule(
        ("key_heads",), ("heads", "key_heads"), "delta_heads", "heads"
    ),
    recurrent_blocks.SelectiveScanSpec: _CHANNELS,
    recurrent_blocks.RGLRUSpec: _CHANNELS,
    recurrent_blocks.WKVSpec: _CHANNELS,
}
_RECURRENCES = (
    *(
        recurrent_blocks.ConvSpec,
        recurrent_blocks.SSMSpec,
        recurrent_blocks.DeltaSpec,
        recurrent_blocks.SelectiveScanSpec,
    ),
    *(recurrent_blocks.RGLRUSpec, recurrent_blocks.WKVSpec),
)


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
    axis: str,
    unit: Callable[[str], int],
    carried: Collection[str],
) -> dict[str, tuple[Block, dict[str, AxisSharding]]]:
    """The modules that are divided with a layer's recurrences, and how their axes are.

    Args:
        axis: of the mesh.
        unit: the name of a module -> how many columns of its weight have to stay together.
        carried: names of values that other layers read.
    """
    own = dict(layer.modules)
    if not any(isinstance(block, _RECURRENCES) for block in own.values()):
        return {}
    calls, results = _calls(layer, carried)
    chosen = {
        name: own[name]
        for name in calls
        if name in own and isinstance(own[name], (blocks.LinearSpec, *_RULES))
    }
    while (refused := _refused(chosen, calls, results, devices, unit)) is not None:
        del chosen[refused]
    if not any(isinstance(block, _RECURRENCES) for block in chosen.values()):
        return {}
    outputs = _outputs(chosen, calls)
    return {name: _local(block, devices, axis, name in outputs) for name, block in chosen.items()}


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
    return all(getattr(block, field) % devices == 0 for field in _RULES[type(block)].counts)


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


def _local(
    block: Block, devices: int, axis: str, gives_parts: bool
) -> tuple[Block, dict[str, AxisSharding]]:
    """One device's block, and how its parameters' axes are divided."""
    if _is_linear(block):
        whole = block.outputs if gives_parts else block.inputs
        shares = {"part": shard_evenly(whole, devices)}
        made: Any = ColumnLinearBlock if gives_parts else RowLinearBlock
        field = "outputs" if gives_parts else "inputs"
        return made(**(vars(block) | {field: whole // devices})), shares
    rule = _RULES[type(block)]
    changed = {field: getattr(block, field) // devices for field in rule.sizes}
    if isinstance(block, recurrent_blocks.SSMSpec) and block.groups % devices == 0:
        changed["groups"] = block.groups // devices
    if isinstance(block, blocks.RMSNormSpec) and block.groups == 1:
        size = block.size // devices
        of_all: Any = vars(block) | {"size": size, "whole": block.size, "axis": axis}
        return ShardedRMSBlock(**of_all), {"hidden": shard_evenly(block.size, devices)}
    if getattr(block, "shared", False):
        return replace(block, **changed), {}
    sharding = {rule.axis: shard_evenly(getattr(block, rule.total), devices)}
    return replace(block, **changed), sharding

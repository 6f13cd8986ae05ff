"""Sharding rules: tensor parallelism of each block type, and the specification of one shard.

Attention is divided by heads (column parallel in q, k, v; row parallel in the output projection),
feed-forwards and experts by columns of the inner width, the embedding and the head by vocabulary
(Megatron-LM, Shoeybi et al. 2019). What no rule names is replicated. Each layer then needs an
all-reduce after the attention and one after the feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from jinfer.modelspec import attention_blocks, blocks, feed_forward_blocks, position_blocks
from jinfer.modelspec.block import Block
from jinfer.modelspec.layer_spec import LayerSpec
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.positions import alibi_slopes
from jinfer.nn.tensor_parallel import ShardedAlibi, ShardedEmbeddingBlock, ShardedHeadBlock
from jinfer.parallel.shard_recurrences import divided_modules
from jinfer.parallel.shard_sizes import AxisSharding, ShardingError, shard_evenly, shard_heads

TENSOR_AXIS = "tensor"  # the mesh axis over which tensor parallelism divides

type ModuleShardings = dict[
    str, dict[str, AxisSharding]
]  # module -> logical axis -> how it is divided


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
    if devices == 1:
        return spec, {}
    divide = _SpecSharder(devices, unit, spec.dims.get("vocab", 0))
    outside = {name for stack in spec.stacks for name in (*stack.stem.calls, *stack.head.calls)}
    shared = divide.modules("", spec.shared, outside)
    stacks = tuple(
        replace(
            stack,
            modules=divide.modules(f"{stack.name}.", stack.modules, outside),
            layers=tuple(
                LayerSpec(
                    layer.wiring,
                    divide.modules_of_layer(f"{stack.name}.{i}.", layer, stack.carried),
                    axis=TENSOR_AXIS,
                )
                for i, layer in enumerate(stack.layers)
            ),
        )
        for stack in spec.stacks
    )
    return replace(spec, shared=shared, stacks=stacks), divide.shares


class _SpecSharder:
    def __init__(self, devices: int, unit: Callable[[str], int], vocab: int) -> None:
        self.devices, self.unit, self.vocab = devices, unit, vocab
        self.shares: ModuleShardings = {}

    def modules(
        self,
        prefix: str,
        modules: Iterable[tuple[str, Block]],
        outside: Collection[str] = (),
    ) -> tuple[tuple[str, Block], ...]:
        """Modules as one device has them.

        Args:
            outside: names of modules that are called before or after the layers.
        """
        return tuple(
            (name, self._block(prefix + name, block, name in outside)) for name, block in modules
        )

    def modules_of_layer(
        self, prefix: str, layer: LayerSpec, carried: Collection[str]
    ) -> tuple[tuple[str, Block], ...]:
        """A layer's modules as one device has them; `carried` as of `divided_modules`."""
        own = divided_modules(
            layer, self.devices, TENSOR_AXIS, lambda name: self.unit(prefix + name), carried
        )
        for name, (_, shares) in own.items():
            if shares:
                self.shares[prefix + name] = shares
        rest = [module for module in layer.modules if module[0] not in own]
        others = dict(self.modules(prefix, rest))
        return tuple((n, own[n][0] if n in own else others[n]) for n, _ in layer.modules)

    def _block(self, name: str, block: Block, outside: bool) -> Any:
        if outside and block.gives_partial_sums():
            # Only layers all-reduce the partial sums of such a module.
            raise ShardingError(f"{name}: is called before or after the layers; divide by layers")
        try:
            local, shares = self._divided(name, block)
        except ShardingError as error:
            raise ShardingError(f"{name}: {error}") from None
        if shares:
            self.shares[name] = shares
        return local

    def _divided(self, name: str, block: Block) -> tuple[Any, dict[str, AxisSharding]]:
        """One device's block, smaller along its logical axes, and how these are divided."""
        sizes = {axis: getattr(block, field) for axis, field in block.axes().items()}
        if sizes.get("vocab", self.vocab) != self.vocab:  # another table, read by every device
            return block, {}
        if sizes and (reason := block.undividable()):
            raise ShardingError(reason)
        shares = {}
        for axis, size in sizes.items():
            match axis:
                case "heads":
                    key = sizes.get("kv_heads", size)
                    shares["heads"], shares["kv_heads"] = shard_heads(size, key, self.devices)
                case "mlp":
                    shares["mlp"] = self._columns(name, block, size)
                case "vocab":
                    shares["vocab"] = shard_evenly(size, self.devices)
        shares = {axis: shares[axis] for axis in sizes}
        changed = {field: shares[axis].size for axis, field in block.axes().items()}
        return self._local(block, changed, shares), shares

    def _local(
        self, block: Any, changed: dict[str, int], shares: Mapping[str, AxisSharding]
    ) -> Block:
        local = replace(block, **changed)
        match block:
            case blocks.EmbeddingSpec():
                return ShardedEmbeddingBlock(**_fields(local), axis=TENSOR_AXIS)
            case blocks.HeadSpec():
                whole = block.outputs
                return ShardedHeadBlock(**_fields(local), axis=TENSOR_AXIS, whole=whole)
            case attention_blocks.AttentionSpec(position=position_blocks.AlibiSpec() as alibi):
                heads = shares["heads"]
                slopes = alibi_slopes(block.heads, alibi).tolist()
                by_device = tuple(
                    (*slopes[start : start + count], *(0.0,) * (heads.size - count))
                    for start, count in zip(heads.starts, heads.counts, strict=True)
                )
                position = ShardedAlibi(**_fields(alibi), axis=TENSOR_AXIS, slopes=by_device)
                return replace(local, position=position)
        return local

    def _columns(self, name: str, block: Any, width: int) -> AxisSharding:
        columns = shard_evenly(width, self.devices, self.unit(name))
        plain = not getattr(block, "gated", isinstance(block, feed_forward_blocks.GatedMLPSpec))
        if columns.padding and plain and block.activation == "sigmoid":
            raise ShardingError(
                f"its width of {width} does not divide among {self.devices} devices, and "
                "the sigmoid of padding is not 0; take other numbers of devices"
            )
        return columns


def _fields(block: Any) -> dict[str, Any]:
    return {field.name: getattr(block, field.name) for field in fields(block)}

"""A stage's specification: some layers of a model, and of each the part that one device has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jinfer.modelspec import blocks
from jinfer.modelspec.layer_spec import LayerSpec, StackSpec
from jinfer.modelspec.model_spec import ModelSpec
from jinfer.nn.positions import alibi_slopes
from jinfer.nn.tensor_parallel import SplitAlibi, SplitEmbedding, SplitHead
from jinfer.parallel.shard_sizes import Share, ShareError, even, heads

AXIS = "tensor"

_SUMMED = (
    *(blocks.Attention, blocks.CrossAttention, blocks.LatentAttention),
    *(blocks.MLP, blocks.GatedMLP, blocks.MixtureOfExperts),
)

type Shares = dict[str, dict[str, Share]]  # module -> logical axis -> who has what of it


@dataclass(frozen=True)
class Part:
    """What a stage has of a model.

    Attributes:
        layers: of each stack, by its name.
        first: whether it has what comes before the layers...
        last: ...and what comes after them.
    """

    layers: Mapping[str, range]
    first: bool = True
    last: bool = True


def whole_of(spec: ModelSpec) -> Part:
    """All of a model."""
    return Part({stack.name: range(len(stack.layers)) for stack in spec.stacks})


def stage_spec(spec: ModelSpec, part: Part) -> ModelSpec:
    """The specification of a stage; its layers are counted from 0."""
    stacks = tuple(_stack(stack, part) for stack in spec.stacks)
    named = {name for stack in stacks for name in _called(stack, part)}
    if any(isinstance(block, blocks.Head) and block.tied for block in _blocks(spec, stacks, named)):
        named.add("embed")
    shared = tuple((name, block) for name, block in spec.shared if name in named)
    return replace(spec, shared=shared, stacks=stacks)


def _stack(stack: StackSpec, part: Part) -> StackSpec:
    own = part.layers[stack.name]
    layers = stack.layers[own.start : own.stop]
    kept = replace(stack, layers=layers)
    named = set(_called(kept, part))
    return replace(kept, modules=tuple(each for each in stack.modules if each[0] in named))


def _called(stack: StackSpec, part: Part) -> Iterator[str]:
    """Names of the modules that a stage calls."""
    yield from stack.stem.calls if part.first else ()
    yield from stack.head.calls if part.last else ()
    for layer in stack.layers:
        yield from layer.wiring.calls


def _blocks(
    spec: ModelSpec, stacks: Iterable[StackSpec], named: Iterable[str]
) -> Iterator[blocks.Block]:
    names = set(named)
    yield from (block for name, block in spec.shared if name in names)
    yield from (block for stack in stacks for _, block in stack.modules)


def divided(spec: ModelSpec, devices: int, unit: Callable[[str], int]) -> tuple[ModelSpec, Shares]:
    """What each of several devices has of a stage, which for all of them is of the same shape.

    Args:
        unit: the name of a feed-forward -> columns of it that cannot be torn apart.

    Raises:
        ShareError: something cannot be divided.
    """
    if devices == 1:
        return spec, {}
    divide = _Dividing(devices, unit, spec.dims.get("vocab", 0))
    outside = {name for stack in spec.stacks for name in (*stack.stem.calls, *stack.head.calls)}
    shared = divide.modules("", spec.shared, outside)
    stacks = tuple(
        replace(
            stack,
            modules=divide.modules(f"{stack.name}.", stack.modules, outside),
            layers=tuple(
                LayerSpec(
                    layer.wiring, divide.modules(f"{stack.name}.{i}.", layer.modules), axis=AXIS
                )
                for i, layer in enumerate(stack.layers)
            ),
        )
        for stack in spec.stacks
    )
    return replace(spec, shared=shared, stacks=stacks), divide.shares


class _Dividing:
    def __init__(self, devices: int, unit: Callable[[str], int], vocab: int) -> None:
        self.devices, self.unit, self.vocab = devices, unit, vocab
        self.shares: Shares = {}

    def modules(
        self,
        prefix: str,
        modules: Iterable[tuple[str, blocks.Block]],
        outside: Collection[str] = (),
    ) -> tuple[tuple[str, blocks.Block], ...]:
        """Modules with the parts of one device; those called `outside` of layers among them."""
        return tuple(
            (name, self._block(prefix + name, block, name in outside)) for name, block in modules
        )

    def _block(self, name: str, block: blocks.Block, outside: bool) -> Any:
        if outside and isinstance(block, _SUMMED):
            # Layers alone add up what such a module gives.
            raise ShareError(f"{name}: is called before or after the layers; divide by layers")
        try:
            local, shares = self._divided(name, block)
        except ShareError as error:
            raise ShareError(f"{name}: {error}") from None
        if shares:
            self.shares[name] = shares
        return local

    def _divided(self, name: str, block: blocks.Block) -> tuple[Any, dict[str, Share]]:
        match block:
            case blocks.Attention():
                return self._attention(block)
            case blocks.CrossAttention() | blocks.LatentAttention():
                own, _ = heads(block.heads, block.heads, self.devices)
                return replace(block, heads=own.size), {"heads": own}
            case blocks.MLP() | blocks.GatedMLP() | blocks.MixtureOfExperts():
                own = self._columns(name, block)
                return replace(block, width=own.size), {"mlp": own}
            case blocks.Embedding() if block.size == self.vocab:
                own = even(block.size, self.devices)
                kept = _fields(block) | {"size": own.size}
                return SplitEmbedding(**kept, axis=AXIS), {"vocab": own}
            case blocks.Head() if block.outputs == self.vocab:
                own = even(block.outputs, self.devices)
                kept = _fields(block) | {"outputs": own.size}
                return SplitHead(**kept, axis=AXIS, whole=block.outputs), {"vocab": own}
        return block, {}

    def _attention(self, block: blocks.Attention) -> tuple[Any, dict[str, Share]]:
        if block.qk_norm is not None and block.qk_norm.over == "width":
            raise ShareError(
                "its norm of queries and keys is over all heads together, so its heads cannot be "
                "divided; divide by layers"
            )
        own, of_key = heads(block.heads, block.kv_heads, self.devices)
        local = replace(block, heads=own.size, kv_heads=of_key.size)
        if isinstance(block.position, blocks.Alibi):
            slopes = alibi_slopes(block.heads, block.position).tolist()
            each = tuple(
                (*slopes[start : start + count], *(0.0,) * (own.size - count))
                for start, count in zip(own.starts, own.counts, strict=True)
            )
            position = SplitAlibi(**_fields(block.position), axis=AXIS, slopes=each)
            local = replace(local, position=position)
        return local, {"heads": own, "kv_heads": of_key}

    def _columns(
        self, name: str, block: blocks.MLP | blocks.GatedMLP | blocks.MixtureOfExperts
    ) -> Share:
        own = even(block.width, self.devices, self.unit(name))
        plain = not getattr(block, "gated", isinstance(block, blocks.GatedMLP))
        if own.padding and plain and block.activation == "sigmoid":
            raise ShareError(
                f"its width of {block.width} does not divide among {self.devices} devices, and "
                "the sigmoid of padding is not 0; take other numbers of devices"
            )
        return own


def _fields(block: Any) -> dict[str, Any]:
    return {name: getattr(block, name) for name in block.__dataclass_fields__}

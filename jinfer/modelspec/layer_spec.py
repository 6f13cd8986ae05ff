"""Layer and stack specifications: modules and wiring of a resolved model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jinfer.modelspec.attention_blocks import AttentionSpec, IndexerSpec, LatentAttentionSpec
from jinfer.modelspec.block import Block
from jinfer.modelspec.bounded_types import Size
from jinfer.modelspec.formula import Formula


@dataclass(frozen=True)
class LayerSpec:
    """A layer: its modules and their wiring.

    Attributes:
        axis: mesh axis over which its attention and feed-forward blocks are sharded, so that their
            outputs need an all-reduce; None: not sharded.
    """

    wiring: Formula
    modules: tuple[tuple[str, Block], ...]
    axis: str | None = None

    @cached_property
    def takes(self) -> frozenset[str]:
        """Names, other than `x`, of the values that it takes from the layers before it."""
        return frozenset(self.wiring.takes) | {chosen_value(name) for name in self.reusing}

    @cached_property
    def gives(self) -> frozenset[str]:
        """Names, other than `x`, of the values that it can give to later layers."""
        return self.wiring.assigned | {chosen_value(name) for name in self.choosing}

    @property
    def choosing(self) -> frozenset[str]:
        """The attentions whose indexer chooses keys."""
        return frozenset(n for n, b in self.modules if (at := indexer_of(b)) and not at.shared)

    @property
    def reusing(self) -> frozenset[str]:
        """The attentions to keys that an earlier layer has chosen."""
        return frozenset(n for n, b in self.modules if (at := indexer_of(b)) and at.shared)


def chosen_value(attention: str) -> str:
    """The name, which no formula can use, of the keys that an attention has chosen."""
    return f"{attention}.chosen"


def indexer_of(block: Block | None) -> IndexerSpec | None:
    """The indexer of an attention, its own or another's."""
    return block.indexer if isinstance(block, AttentionSpec | LatentAttentionSpec) else None


def shared_keys(layers: Sequence[LayerSpec]) -> dict[tuple[int, str], int]:
    """The attentions to another layer's keys: (layer, module) -> that layer."""
    return {
        (number, name): block.kv_layer
        for number, layer in enumerate(layers)
        for name, block in layer.modules
        if isinstance(block, AttentionSpec) and block.kv_layer is not None
    }


def some_layers(layers: Sequence[LayerSpec], chosen: Sequence[int]) -> tuple[LayerSpec, ...]:
    """Some of a stack's layers, with the numbers that they then have.

    Raises:
        LookupError: one takes the keys of a layer that is not among them.
    """
    new = {number: i for i, number in enumerate(chosen)}
    found: dict[int, dict[str, Any]] = {n: dict(layers[n].modules) for n in chosen}
    for (number, name), other in shared_keys(layers).items():
        if number not in new:
            continue
        if other not in new:
            raise LookupError(f"layer {number} takes the keys of layer {other} for its {name}")
        found[number][name] = replace(found[number][name], kv_layer=new[other])
    return tuple(replace(layers[n], modules=tuple(found[n].items())) for n in chosen)


@dataclass(frozen=True)
class FollowSpec:
    """The inputs of a draft head from its target model: `[decoder.follows]`.

    Attributes:
        layers: target layers whose hidden states are concatenated: from 0 on, from the end -1 on,
            or "middle".
        width: width of the concatenated hidden states.
        hidden: the head's input besides tokens, a formula of `hidden`, the concatenated states.
    """

    layers: tuple[int | str, ...]
    width: Size
    hidden: Formula


@dataclass(frozen=True)
class StackSpec:
    """A stack of layers between a stem (tokens to vectors) and a head (vectors to results).

    Attributes:
        name: "decoder" (causal), "encoder" (bidirectional) or "vision" (over patches of images).
        modules: modules of the stem and the head.
        follows: inputs from the target model, for a draft head.
        onward: values that layers after the last one take, of a part of a stack; None: it is whole.
        group: of "vision": patches come in groups of this many rows and columns; 1: row by row.
    """

    name: str
    stem: Formula
    layers: tuple[LayerSpec, ...]
    head: Formula
    modules: tuple[tuple[str, Block], ...]
    follows: FollowSpec | None = None
    onward: tuple[str, ...] | None = None
    group: int = 1

    @cached_property
    def carried(self) -> frozenset[str]:
        """Names, other than `x`, of the values that a layer or the head takes from earlier ones."""
        taken = set(self.head.takes).union(*(layer.takes for layer in self.layers))
        return frozenset(taken.union(self.onward or ()))

    def values_before(self, number: int) -> tuple[str, ...]:
        """Names, other than `x`, of the values that must be carried into this layer."""
        live = set(self.head.takes if self.onward is None else self.onward)
        for layer in reversed(self.layers[number:]):
            live = live - layer.gives | layer.takes
        return tuple(sorted(live))

"""Layer and stack specifications: modules and wiring of a resolved model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jinfer.modelspec.blocks import AttentionSpec, Block
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
        name: "decoder" (causal) or "encoder" (bidirectional).
        modules: modules of the stem and the head.
        follows: inputs from the target model, for a draft head.
        onward: values that layers after the last one take, of a part of a stack; None: it is whole.
    """

    name: str
    stem: Formula
    layers: tuple[LayerSpec, ...]
    head: Formula
    modules: tuple[tuple[str, Block], ...]
    follows: FollowSpec | None = None
    onward: tuple[str, ...] | None = None

    @cached_property
    def carried(self) -> frozenset[str]:
        """The values beside `x` that some formula takes from one before it."""
        taken = {name for part in (self.head, *self.wirings) for name in part.takes}
        return frozenset(taken.union(self.onward or ()))

    @cached_property
    def wirings(self) -> tuple[Formula, ...]:
        """The formulas of the layers."""
        return tuple(layer.wiring for layer in self.layers)

    def values_before(self, number: int) -> tuple[str, ...]:
        """The values beside `x` that a layer and what comes after it take from before it."""
        live = set(self.head.takes if self.onward is None else self.onward)
        for wiring in reversed(self.wirings[number:]):
            live = live - wiring.assigned | set(wiring.takes)
        return tuple(sorted(live))

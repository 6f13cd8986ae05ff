"""Layer and stack specifications: modules and wiring of a resolved model."""

from __future__ import annotations

from dataclasses import dataclass

from jinfer.modelspec.blocks import Block
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
    """

    name: str
    stem: Formula
    layers: tuple[LayerSpec, ...]
    head: Formula
    modules: tuple[tuple[str, Block], ...]
    follows: FollowSpec | None = None

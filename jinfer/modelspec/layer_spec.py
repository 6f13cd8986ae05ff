"""Layers and stacks of a resolved specification."""

from __future__ import annotations

from dataclasses import dataclass

from jinfer.modelspec.blocks import Block
from jinfer.modelspec.bounded_types import Size
from jinfer.modelspec.formula import Formula


@dataclass(frozen=True)
class LayerSpec:
    """One layer: the modules it has and how they are wired.

    Attributes:
        axis: of the mesh whose devices have a part each of its attentions and feed-forwards, so
            that what these give has to be added up; none: it is whole.
    """

    wiring: Formula
    modules: tuple[tuple[str, Block], ...]
    axis: str | None = None


@dataclass(frozen=True)
class FollowSpec:
    """What a head that drafts for another model takes of it: `[decoder.follows]`.

    Attributes:
        layers: those of the followed model whose vectors it is given, one behind the other: from 0
            on, from the end -1 on, or "middle".
        width: of all these vectors together.
        hidden: what the head is given besides tokens, a formula of `hidden`, the vectors.
    """

    layers: tuple[int | str, ...]
    width: Size
    hidden: Formula


@dataclass(frozen=True)
class StackSpec:
    """A stack of layers between a stem (tokens to vectors) and a head (vectors to results).

    Attributes:
        name: "decoder" (causal) or "encoder" (of whole texts).
        modules: modules of the stem and the head.
        follows: of a head that drafts for another model: what it takes of that.
    """

    name: str
    stem: Formula
    layers: tuple[LayerSpec, ...]
    head: Formula
    modules: tuple[tuple[str, Block], ...]
    follows: FollowSpec | None = None

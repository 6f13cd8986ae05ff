"""Residual stream blocks: mixing, adding up and rescaling equal parts of a wide vector.

A model with several residual streams (AltUp, arXiv 2301.13310; hyper-connections, arXiv 2409.19606)
has them side by side in one vector, and takes one of them as `x[begin:end]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jinfer.modelspec.block import ArrayKind, Block
from jinfer.modelspec.bounded_types import NotNegative, Size


@dataclass(frozen=True, kw_only=True)
class MixSpec(Block):
    """Weighted sums of the equal parts of a vector: `mix(x, weights)`.

    Of `inputs` parts become `outputs`. The weights are a vector, too, computed from each token:
    first those of the first output, one for each input.

    inputs: number of parts of `x`.
    outputs: number of parts of the result.
    """

    kind: Literal["mix"]
    inputs: Size
    outputs: Size
    takes: ClassVar[tuple[ArrayKind, ...]] = ("vectors", "vectors")
    passes: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class RepeatSpec(Block):
    """A vector several times, one after the other."""

    kind: Literal["repeat"]
    times: Size
    passes: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class SumSpec(Block):
    """The sum of the equal parts of a vector."""

    kind: Literal["sum"]
    parts: Size
    passes: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class RescaleSpec(Block):
    """Gives the parts of a vector the root mean square of another one: `rescale(x, like)`.

    x * sqrt(mean(like^2) / max(mean(x^2), eps)), for each part of x.

    parts: number of equal parts of `x`.
    eps: the least mean square that is divided by.
    """

    kind: Literal["rescale"]
    parts: Size = 1
    eps: NotNegative = 1e-5
    takes: ClassVar[tuple[ArrayKind, ...]] = ("vectors", "vectors")
    passes: ClassVar[int] = 1

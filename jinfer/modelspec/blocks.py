"""Building blocks of a specification (attention, feed-forward, norms, ...), as frozen dataclasses.

`kind = "..."` in a module's table selects the class; the other keys are its fields. A field with
the default `dim("name")` defaults to that dimension in `[dims]`. `check` returns what is wrong with
a combination of fields, as (field, reason). `jinfer.nn.block_registry` has the Flax module of each
block. The docstrings are part of docs/specs.md.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Union

from jinfer.modelspec import (
    attention_blocks,
    feed_forward_blocks,
    image_blocks,
    position_blocks,
    recurrent_blocks,
)
from jinfer.modelspec.block import ArrayKind, Block
from jinfer.modelspec.bounded_types import Count, NotNegative, Size, dim


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpec(Block):
    """An embedding table of `size` rows: `embed(tokens)`."""

    kind: Literal["embedding"]
    size: int = dim("vocab", axis="vocab")
    width: int = dim("hidden")
    takes: ClassVar[tuple[ArrayKind, ...]] = ("indices",)


@dataclass(frozen=True, kw_only=True)
class RMSNormSpec(Block):
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467).

    weight: whether there is a weight.
    plus_one: the factor is 1 + weight.
    groups: parts of equal size, such as heads, each with a mean of its own.
    shared: all groups have the same weight.
    """

    kind: Literal["rms"]
    size: int = dim("hidden")
    eps: NotNegative = 1e-6
    weight: bool = True
    plus_one: bool = False
    groups: Size = 1
    shared: bool = False
    passes: ClassVar[int] = 1

    def check(self) -> tuple[str, str] | None:
        if self.size % self.groups:
            return "groups", f"{self.groups} does not divide size = {self.size}"
        return None


@dataclass(frozen=True, kw_only=True)
class L2NormSpec(Block):
    """L2 norm: x / sqrt(sum(x^2) + eps)."""

    kind: Literal["l2"]
    eps: NotNegative = 1e-6
    passes: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class ScaleSpec(Block):
    """Multiplication by learned numbers: a vector (LayerScale, arXiv 2103.17239) or a scalar.

    size: how many numbers there are. Each is the factor of as many consecutive dimensions; 1 is a
        scalar, the number of heads a factor per head.
    plus_one: the factor is 1 + weight.
    """

    kind: Literal["scale"]
    size: int = dim("hidden")
    plus_one: bool = False
    passes: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class BiasSpec(Block):
    """Addition of a learned vector."""

    kind: Literal["bias"]
    size: int = dim("hidden")
    passes: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class LayerNormSpec(Block):
    """Layer norm: (x - mean) / sqrt(variance + eps) * weight + bias (arXiv 1607.06450).

    weight: whether there is a weight.
    bias: whether there is a bias.
    plus_one: the factor is 1 + weight.
    groups: parts of equal size, such as heads, each with a mean and a variance of its own.
    """

    kind: Literal["layer"]
    size: int = dim("hidden")
    eps: NotNegative = 1e-5
    weight: bool = True
    bias: bool = True
    plus_one: bool = False
    groups: Size = 1
    passes: ClassVar[int] = 1

    def check(self) -> tuple[str, str] | None:
        if self.size % self.groups:
            return "groups", f"{self.groups} does not divide size = {self.size}"
        return None


@dataclass(frozen=True, kw_only=True)
class LinearSpec(Block):
    """A dense projection, weight [outputs, inputs]."""

    kind: Literal["linear"]
    inputs: int = dim("hidden")
    outputs: int = dim("hidden")
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockLinearSpec(Block):
    """A block-diagonal projection, weight [blocks, outputs / blocks, inputs / blocks]."""

    kind: Literal["block_linear"]
    blocks: int = dim("heads")
    inputs: int = dim("hidden")
    outputs: int = dim("hidden")
    bias: bool = False

    def check(self) -> tuple[str, str] | None:
        for field in ("inputs", "outputs"):
            if getattr(self, field) % self.blocks:
                return "blocks", f"{self.blocks} does not divide {field} = {getattr(self, field)}"
        return None


@dataclass(frozen=True, kw_only=True)
class ConcatSpec(Block):
    """Concatenation of two vectors: `concat(a, b)`."""

    kind: Literal["concat"]
    takes: ClassVar[tuple[ArrayKind, ...]] = ("vectors", "vectors")
    passes: ClassVar[int] = 2


@dataclass(frozen=True, kw_only=True)
class SelectSpec(Block):
    """Some numbers of a vector, such as the logits of two tokens.

    indices: which, from 0 on.
    """

    kind: Literal["select"]
    indices: tuple[Count, ...]

    @property
    def outputs(self) -> int:
        """How many numbers it gives."""
        return len(self.indices)


@dataclass(frozen=True, kw_only=True)
class VocabMapSpec(Block):
    """Scatters logits of a reduced vocabulary to the whole one; other tokens are never sampled.

    The parameter `offsets` is the difference of each token's id and its index in the reduced
    vocabulary.
    """

    kind: Literal["vocab_map"]
    inputs: int = dim("vocab")
    outputs: int = dim("vocab")


@dataclass(frozen=True, kw_only=True)
class HeadSpec(Block):
    """The vocabulary head: a projection to logits (lm_head).

    tied: its weight is that of the module `embed`, unless the checkpoint has a tensor of its own
        for it with other values.
    normalize: the rows of its weight are normalized to length 1 when they are loaded.
    never: ids of tokens that are never sampled, even if their logits are the highest.
    """

    kind: Literal["head"]
    inputs: int = dim("hidden")
    outputs: int = dim("vocab", axis="vocab")
    bias: bool = False
    tied: bool = False
    normalize: bool = False
    never: tuple[int, ...] | None = None

    def check(self) -> tuple[str, str] | None:
        if not all(0 <= token < self.outputs for token in self.never or ()):
            return "never", f"{list(self.never or ())} has a token outside the vocabulary"
        if self.tied and self.normalize:
            return "normalize", "cannot be true of a tied head, whose weight the embedding is"
        return None

    def misplaced(self, stack: str, part: str) -> str:
        return "" if part == "head" else "a vocabulary head, which only the head formula can"


@dataclass(frozen=True, kw_only=True)
class PoolSpec(Block):
    """Pooling: one vector for a whole text, in the head of an encoder.

    take: the vector of the "first" or the "last" token, or the "mean" of all.
    """

    kind: Literal["pool"]
    take: Literal["first", "last", "mean"] = "first"

    def misplaced(self, stack: str, part: str) -> str:
        needs = "a pool, which only the head formula of an encoder can: it needs whole texts"
        return "" if (stack, part) == ("encoder", "head") else needs


@dataclass(frozen=True, kw_only=True)
class ClassifierSpec(Block):
    """A classification head: a projection to one number per class, in float32, never quantized.

    outputs: how many classes there are.
    """

    kind: Literal["classifier"]
    inputs: int = dim("hidden")
    outputs: Size = 1
    bias: bool = False

    def misplaced(self, stack: str, part: str) -> str:
        return "" if part == "head" else "a classification head, which only the head formula can"


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


def _block_kinds() -> tuple[type[Block], ...]:
    """The block classes with a `kind` of their own, in the order of their definitions."""
    files = (
        sys.modules[__name__],
        position_blocks,
        attention_blocks,
        feed_forward_blocks,
        recurrent_blocks,
        image_blocks,
    )
    return tuple(
        value
        for file in files
        for value in vars(file).values()
        if isinstance(value, type) and value.__module__ == file.__name__
        if issubclass(value, Block) and "kind" in inspect.get_annotations(value)
    )


BLOCKS = _block_kinds()

# The type of a module's table in a specification: any of the blocks.
AnyBlock: Any = Union[BLOCKS]  # noqa: UP007 - of a tuple

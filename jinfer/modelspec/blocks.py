"""Building blocks of a specification (attention, feed-forward, norms, ...), as frozen dataclasses.

`kind = "..."` in a module's table selects the class; the other keys are its fields. A field with
the default `dim("name")` defaults to that dimension in `[dims]`. `check` returns what is wrong with
a combination of fields, as (field, reason). `MODULES` names the Flax module that computes a block.
The docstrings are part of docs/specs.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Union

from jinfer.modelspec.attention_blocks import (
    AttentionSpec,
    CrossAttentionSpec,
    ExpertAttentionSpec,
    LatentAttentionSpec,
)
from jinfer.modelspec.attention_parts import (
    DifferentialSpec,
    HeadNormSpec,
    IndexerSpec,
    OutputGateSpec,
    QKNormSpec,
    TemperatureSpec,
)
from jinfer.modelspec.block import ArrayKind, Block
from jinfer.modelspec.bounded_types import Count, NotNegative, Size, dim
from jinfer.modelspec.feed_forward_blocks import (
    ACTIVATION_ALIASES,
    Activation,
    ActivationSpec,
    GatedActivation,
    GatedMLPSpec,
    MLPSpec,
    MoESpec,
)
from jinfer.modelspec.position_blocks import (
    AlibiSpec,
    DisentangledSpec,
    LearnedPositionsSpec,
    RelativeBiasSpec,
    RopeScalingSpec,
    RopeSpec,
    SinusoidalPositionsSpec,
)
from jinfer.modelspec.recurrent_blocks import (
    BonusSpec,
    ConvSpec,
    DeltaSpec,
    LinearAttentionSpec,
    LRUSpec,
    SelectiveScanSpec,
    ShiftSpec,
    SSMSpec,
    WKV7Spec,
    WKVSpec,
)
from jinfer.modelspec.stream_blocks import MixSpec, RepeatSpec, RescaleSpec, SumSpec

__all__ = [
    "ACTIVATION_ALIASES",
    "MODULES",
    "Activation",
    "ActivationSpec",
    "AlibiSpec",
    "AnyBlock",
    "AttentionSpec",
    "BiasSpec",
    "Block",
    "BlockLinearSpec",
    "BonusSpec",
    "ClassifierSpec",
    "ConcatSpec",
    "ConvSpec",
    "CrossAttentionSpec",
    "DeltaSpec",
    "DifferentialSpec",
    "DisentangledSpec",
    "EmbeddingSpec",
    "ExpertAttentionSpec",
    "GatedActivation",
    "GatedMLPSpec",
    "HeadNormSpec",
    "HeadSpec",
    "IndexerSpec",
    "L2NormSpec",
    "LRUSpec",
    "LatentAttentionSpec",
    "LayerNormSpec",
    "LearnedPositionsSpec",
    "LinearAttentionSpec",
    "LinearSpec",
    "MLPSpec",
    "MixSpec",
    "MoESpec",
    "OutputGateSpec",
    "PoolSpec",
    "QKNormSpec",
    "RMSNormSpec",
    "RelativeBiasSpec",
    "RepeatSpec",
    "RescaleSpec",
    "RopeScalingSpec",
    "RopeSpec",
    "SSMSpec",
    "ScaleSpec",
    "SelectSpec",
    "SelectiveScanSpec",
    "ShiftSpec",
    "SinusoidalPositionsSpec",
    "SpreadSpec",
    "SumSpec",
    "TemperatureSpec",
    "WKV7Spec",
    "WKVSpec",
]


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
class SpreadSpec(Block):
    """Scatters logits of a reduced vocabulary to the whole one; other tokens are never sampled.

    The parameter `offsets` is the difference of each token's id and its index in the reduced
    vocabulary.
    """

    kind: Literal["spread"]
    inputs: int = dim("vocab")
    outputs: int = dim("vocab")


@dataclass(frozen=True, kw_only=True)
class HeadSpec(Block):
    """The vocabulary head: a projection to logits (lm_head).

    tied: its weight is that of the module `embed`, unless the checkpoint has a tensor of its own
        for it with other values.
    normalize: the rows of its weight are normalized to length 1 when they are loaded.
    never: ids of tokens that are never sampled, whatever their logits.
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


# The blocks of the language -> the Flax module of each, in `jinfer.nn`. A name, so that reading a
# specification imports none.
MODULES: dict[type[Block], str] = {
    EmbeddingSpec: "projections.Embedding",
    LearnedPositionsSpec: "positions.PositionTable",
    SinusoidalPositionsSpec: "positions.Sinusoids",
    RMSNormSpec: "norm_modules.RMSNorm",
    L2NormSpec: "norm_modules.L2Norm",
    LayerNormSpec: "norm_modules.LayerNorm",
    ScaleSpec: "norm_modules.Scale",
    BiasSpec: "norm_modules.Bias",
    LinearSpec: "projections.Linear.of",
    BlockLinearSpec: "projections.BlockLinear",
    ConcatSpec: "stream_modules.Concat",
    SelectSpec: "pooling.Select",
    MixSpec: "stream_modules.Mix",
    RepeatSpec: "stream_modules.Repeat",
    SumSpec: "stream_modules.Sum",
    RescaleSpec: "stream_modules.Rescale",
    SpreadSpec: "stream_modules.VocabMap",
    HeadSpec: "projections.Head",
    ActivationSpec: "feed_forward.Activation",
    PoolSpec: "pooling.Pool",
    ClassifierSpec: "pooling.Classifier",
    AttentionSpec: "attention_modules.Attention",
    ExpertAttentionSpec: "attention_modules.ExpertAttention",
    CrossAttentionSpec: "attention_modules.CrossAttention",
    LatentAttentionSpec: "mla.LatentAttention",
    MLPSpec: "feed_forward.MLP",
    GatedMLPSpec: "feed_forward.GatedMLP",
    MoESpec: "feed_forward.MixtureOfExperts",
    ConvSpec: "recurrent_modules.ShortConv",
    SSMSpec: "recurrent_modules.SSM",
    SelectiveScanSpec: "recurrent_modules.SelectiveScan",
    DeltaSpec: "recurrent_modules.GatedDelta",
    LRUSpec: "recurrent_modules.RGLRU",
    LinearAttentionSpec: "recurrent_modules.LinearAttention",
    ShiftSpec: "recurrent_modules.Shift",
    WKVSpec: "recurrent_modules.WKV",
    WKV7Spec: "recurrent_modules.WKV7",
    BonusSpec: "recurrent_modules.Bonus",
}

# The type of a module's table in a specification: any of the blocks.
AnyBlock: Any = Union[tuple(MODULES)]  # noqa: UP007 - of a tuple

"""Building blocks of a specification (attention, feed-forward, norms, ...), as frozen dataclasses.

`kind = "..."` in a module's table selects the class; the other keys are its fields. A field with
the default `dim("name")` defaults to that dimension in `[dims]`. `check` returns what is wrong with
a combination of fields, as (field, reason). The computation is in `jinfer.nn`, under the same kind.
The docstrings are part of docs/specs.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jinfer.modelspec.attention_blocks import (
    AttentionSpec,
    CrossAttentionSpec,
    LatentAttentionSpec,
    QKNormSpec,
)
from jinfer.modelspec.bounded_types import NotNegative, dim
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

__all__ = [
    "ACTIVATION_ALIASES",
    "LOOKUPS",
    "Activation",
    "ActivationSpec",
    "AlibiSpec",
    "AttentionSpec",
    "Block",
    "ConcatSpec",
    "CrossAttentionSpec",
    "DisentangledSpec",
    "EmbeddingSpec",
    "GatedActivation",
    "GatedMLPSpec",
    "HeadSpec",
    "LatentAttentionSpec",
    "LayerNormSpec",
    "LearnedPositionsSpec",
    "LinearSpec",
    "MLPSpec",
    "MoESpec",
    "PoolSpec",
    "QKNormSpec",
    "RMSNormSpec",
    "RelativeBiasSpec",
    "RopeScalingSpec",
    "RopeSpec",
    "SinusoidalPositionsSpec",
    "SpreadSpec",
]


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpec:
    """An embedding table of `size` rows: `embed(tokens)`."""

    kind: Literal["embedding"]
    size: int = dim("vocab")
    width: int = dim("hidden")


@dataclass(frozen=True, kw_only=True)
class RMSNormSpec:
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467).

    plus_one: the factor is 1 + weight.
    """

    kind: Literal["rms"]
    size: int = dim("hidden")
    eps: NotNegative = 1e-6
    plus_one: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerNormSpec:
    """Layer norm: (x - mean) / sqrt(variance + eps) * weight + bias (arXiv 1607.06450).

    weight: whether there is a weight.
    bias: whether there is a bias.
    plus_one: the factor is 1 + weight.
    """

    kind: Literal["layer"]
    size: int = dim("hidden")
    eps: NotNegative = 1e-5
    weight: bool = True
    bias: bool = True
    plus_one: bool = False


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """A dense projection, weight [outputs, inputs]."""

    kind: Literal["linear"]
    inputs: int = dim("hidden")
    outputs: int = dim("hidden")
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class ConcatSpec:
    """Concatenation of two vectors: `concat(a, b)`."""

    kind: Literal["concat"]


@dataclass(frozen=True, kw_only=True)
class SpreadSpec:
    """Scatters logits of a reduced vocabulary to the whole one; other tokens are never sampled.

    The parameter `offsets` is the difference of each token's id and its index in the reduced
    vocabulary.
    """

    kind: Literal["spread"]
    inputs: int = dim("vocab")
    outputs: int = dim("vocab")


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """The vocabulary head: a projection to logits (lm_head).

    tied: its weight is that of the module `embed`, unless the checkpoint has a tensor of its own
        for it with other values.
    normalize: the rows of its weight are normalized to length 1 when they are loaded.
    never: ids of tokens that are never sampled, whatever their logits.
    """

    kind: Literal["head"]
    inputs: int = dim("hidden")
    outputs: int = dim("vocab")
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


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """Pooling: one vector for a whole text, in the head of an encoder.

    take: the vector of the "first" or the "last" token, or the "mean" of all.
    """

    kind: Literal["pool"]
    take: Literal["first", "last", "mean"] = "first"


Block = (
    EmbeddingSpec
    | LearnedPositionsSpec
    | SinusoidalPositionsSpec
    | RMSNormSpec
    | LayerNormSpec
    | LinearSpec
    | ConcatSpec
    | SpreadSpec
    | HeadSpec
    | ActivationSpec
    | PoolSpec
    | AttentionSpec
    | CrossAttentionSpec
    | LatentAttentionSpec
    | MLPSpec
    | GatedMLPSpec
    | MoESpec
)

# Modules that are lookups by token or position; all others take hidden vectors.
LOOKUPS = (EmbeddingSpec, LearnedPositionsSpec, SinusoidalPositionsSpec)

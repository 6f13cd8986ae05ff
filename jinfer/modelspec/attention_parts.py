"""Parts of attention blocks: norms, output gate, temperature, differential heads, indexer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jinfer.modelspec.bounded_types import Count, NotNegative, Positive, Size
from jinfer.modelspec.feed_forward_blocks import Activation
from jinfer.modelspec.position_blocks import RopeSpec


@dataclass(frozen=True, kw_only=True)
class HeadNormSpec:
    """Normalization inside attention; "l2" is x / sqrt(sum(x^2) + eps) * weight.

    over: "head": each head, with one weight shared by all heads; "heads": each head, with its own
        weight; "width": all heads together.
    weight: whether there is a weight.
    plus_one: the factor is 1 + weight.
    bias: whether there is a bias.
    """

    kind: Literal["rms", "layer", "l2"]
    over: Literal["head", "heads", "width"] = "head"
    eps: NotNegative = 1e-6
    weight: bool = True
    plus_one: bool = False
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class QKNormSpec(HeadNormSpec):
    """Normalization of queries and keys (arXiv 2010.04245).

    rotated: whether it comes after the rotary embedding, else before.
    """

    rotated: bool = False


@dataclass(frozen=True, kw_only=True)
class OutputGateSpec:
    """A gate on attention's output: output * activation(gate(x)), before `o` (arXiv 2505.06708).

    per: "element": `attn.gate` is as wide as the output; "head": it gives a number per head.
    bias: whether the projection has a bias; "head": one number per head, `attn.gate_bias`.
    scale: factor of the activation.
    """

    per: Literal["element", "head"] = "element"
    activation: Activation = "sigmoid"
    bias: bool | Literal["head"] = False
    scale: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class TemperatureSpec:
    """A factor of queries that grows with the position.

    1 + beta * ln(1 + floor((position + offset) / span)) (Llama 4); with `power` it is instead
    (1 + (position + offset) / span)^power.
    """

    beta: NotNegative = 0.0
    span: Size
    offset: Count = 0
    power: NotNegative | None = None

    def check(self) -> tuple[str, str] | None:
        return ("power", "excludes beta") if self.power is not None and self.beta else None


@dataclass(frozen=True, kw_only=True)
class DifferentialSpec:
    """Differential attention (arXiv 2410.05258): the difference of two softmax maps.

    Of the heads, those of the first half less lambda times those of the second; the values of a
    head of either half are those of both. The result is normalized, without a weight, and
    multiplied by 1 - init. lambda is exp(q1 . k1) - exp(q2 . k2) + init, of four learned vectors.

    init: of lambda, in the paper 0.8 - 0.6 * exp(-0.3 * i).
    eps: epsilon of the norm.
    """

    init: NotNegative
    eps: NotNegative = 1e-5


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """Sparse attention: an indexer chooses the keys of each query (arXiv 2512.02556).

    A key's score is the sum over the indexer's heads of w * relu(q . k); q comes from the queries'
    latent or, without one, from the attention's input, w and the key, which all heads share, from
    the input. The key has a layer norm. Queries and keys are rotated after it.

    top_k: how many keys a query attends to: those with the highest scores.
    heads: of the indexer's queries.
    head_dim: dimensions of each, and of the key.
    position: rotation of `dim` dimensions of queries and keys.
    rotated: whether these are the first or the last dimensions.
    eps: epsilon of the key's norm.
    shared: whether the keys are those that the nearest earlier layer's attention of the same name
        has chosen; there are no parameters then.
    """

    top_k: Size
    heads: Size
    head_dim: Size
    position: RopeSpec | None = None
    rotated: Literal["first", "last"] = "first"
    eps: NotNegative = 1e-6
    shared: bool = False

    def check(self) -> tuple[str, str] | None:
        if self.position is not None and self.position.dim > self.head_dim:
            return "position.dim", f"{self.position.dim} is more than head_dim = {self.head_dim}"
        return None

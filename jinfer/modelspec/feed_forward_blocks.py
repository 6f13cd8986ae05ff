"""Feed-forward blocks: dense, gated, mixtures of experts; and the activation functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jinfer.modelspec.bounded_types import NotNegative, Positive, Size, dim

# Names of the same function in published config files, in brackets: silu (swish), gelu is the
# exact erf form, gelu_tanh its approximation (gelu_new, gelu_pytorch_tanh, gelu_fast).
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh"]
GatedActivation = Literal[Activation, "clamped_swiglu"]
ALPHA, LIMIT = 1.702, 7.0  # of clamped_swiglu, as gpt-oss's model card has them
ACTIVATION_ALIASES = {
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "relu_squared": "relu2",
}


@dataclass(frozen=True, kw_only=True)
class ActivationBlock:
    """An activation function alone."""

    kind: Literal["activation"]
    function: Activation = "gelu"


@dataclass(frozen=True, kw_only=True)
class MLP:
    """down(activation(up(x))), the transformer's plain feed-forward."""

    kind: Literal["mlp"]
    inputs: int = dim("hidden")
    width: int = dim("intermediate")
    activation: Activation = "gelu"
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)) (arXiv 2002.05202).

    clamped_swiglu: (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within
    -limit..limit.

    bias: whether the projections have one; "down": that one alone.
    alpha: of clamped_swiglu.
    limit: of clamped_swiglu.
    """

    kind: Literal["gated"]
    inputs: int = dim("hidden")
    width: int = dim("intermediate")
    activation: GatedActivation = "silu"
    bias: bool | Literal["down"] = False
    alpha: Positive = ALPHA
    limit: Positive = LIMIT

    def check(self) -> tuple[str, str] | None:
        return _unused_clamp(self)


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """Feed-forwards of which a router chooses `top_k` for each token (arXiv 1701.06538).

    The output is the sum of what the chosen experts give, each times its weight. An expert is a
    `gated` feed-forward or, with `gated = false`, an `mlp`. Experts that see every token (shared
    experts) are a module of their own in the formula: `x + ffn(n) + shared_expert(n)`.

    experts: how many there are.
    top_k: how many a token goes to.
    width: of an expert.
    alpha: of clamped_swiglu, as in `gated`.
    limit: of clamped_swiglu, as in `gated`.
    bias: whether the experts' projections have one.
    router_bias: whether the router's projection has one.
    scoring: "softmax" over all experts; "sigmoid" of each (arXiv 2412.19437); "sparsemixer"
        (arXiv 2409.12136) one expert after the other, each weighed by a softmax of the scores
        not yet taken that are near the best of them.
    renormalize: the weights are divided by their sum. With "softmax" that is the same as a
        softmax over the chosen experts only.
    scale: of the weights.
    correction_bias: a bias on the scores, `router.correction`, counts for the choice and not for
        the weight (arXiv 2408.15664).
    groups: experts stand in groups of equal size, of which...
    top_k_groups: ...this many are chosen first, by their score.
    group_score: the greatest score of a group ("max") or the sum of its two greatest ("top_2").
    jitter_eps: "sparsemixer": scores within twice this share of the best one are near it.
    """

    kind: Literal["moe"]
    inputs: int = dim("hidden")
    experts: int = dim("experts")
    top_k: int = dim("top_k")
    width: int = dim("expert_intermediate")
    gated: bool = True
    activation: GatedActivation = "silu"
    alpha: Positive = ALPHA
    limit: Positive = LIMIT
    bias: bool = False
    router_bias: bool = False
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    renormalize: bool = False
    scale: Positive = 1.0
    correction_bias: bool = False
    groups: Size = 1
    top_k_groups: Size = 1
    group_score: Literal["max", "top_2"] = "max"
    jitter_eps: NotNegative = 0.01

    def check(self) -> tuple[str, str] | None:
        if not self.gated and self.activation == "clamped_swiglu":
            return "activation", "clamped_swiglu is for gated experts"
        if self.experts % self.groups:
            return "groups", f"{self.groups} does not divide experts = {self.experts}"
        if self.top_k_groups > self.groups:
            return "top_k_groups", f"{self.top_k_groups} is more than groups = {self.groups}"
        left = self.experts // self.groups * self.top_k_groups
        if self.top_k > left:
            return "top_k", f"{self.top_k} is more than the {left} experts to choose from"
        if self.group_score == "top_2" and self.experts < 2 * self.groups:
            return "group_score", "top_2 needs groups of two experts or more"
        if self.scoring == "sparsemixer" and (self.correction_bias or self.groups > 1):
            return "scoring", "sparsemixer has neither a correction_bias nor groups"
        return _unused_clamp(self)


def _unused_clamp(block: GatedMLP | MixtureOfExperts) -> tuple[str, str] | None:
    """What is wrong with numbers of an activation that the block does not have."""
    for name, usual in (("alpha", ALPHA), ("limit", LIMIT)):
        if block.activation != "clamped_swiglu" and getattr(block, name) != usual:
            return name, f"is of clamped_swiglu, but the activation is {block.activation}"
    return None

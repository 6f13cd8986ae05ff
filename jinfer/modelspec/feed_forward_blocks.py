"""Feed-forward blocks: MLP, gated MLP (SwiGLU), mixture of experts (MoE), activation functions."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Literal

from jinfer.modelspec.block import ArrayKind, Block
from jinfer.modelspec.bounded_types import Count, Fraction, NotNegative, Positive, Size, dim

# Aliases in published config files: silu (swish); gelu, the exact erf form; gelu_tanh, its
# approximation (gelu_new, gelu_pytorch_tanh, gelu_fast).
Activation = Literal[
    "silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh", "softplus"
]
GatedActivation = Literal[Activation, "clamped_swiglu", "clamped_silu"]
LearnedActivation = Literal[Activation, "xielu"]
CLAMPED = ("clamped_swiglu", "clamped_silu")
# of clamped_swiglu, from gpt-oss's model card
SWIGLU_ALPHA, SWIGLU_LIMIT, SWIGLU_OFFSET = 1.702, 7.0, 1.0
ACTIVATION_ALIASES = {
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "relu_squared": "relu2",
    "sqrelu": "relu2",
}


@dataclass(frozen=True, kw_only=True)
class ActivationSpec(Block):
    """An activation function alone."""

    kind: Literal["activation"]
    function: Activation = "gelu"
    passes: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class MLPSpec(Block):
    """down(activation(up(x))), the plain feed-forward network (MLP).

    xielu (arXiv 2411.13010) has two learned scalars, `ffn.alpha_p` and `ffn.alpha_n`: with a =
    softplus(alpha_p) and b = 0.5 + softplus(alpha_n), a x^2 + x / 2 above 0, and below it b (exp(x)
    - 1 - x) + x / 2.
    """

    kind: Literal["mlp"]
    inputs: int = dim("hidden")
    width: int = dim("intermediate", axis="mlp")
    activation: LearnedActivation = "gelu"
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class GatedMLPSpec(Block):
    """down(activation(gate(x)) * up(x)), a gated linear unit such as SwiGLU (arXiv 2002.05202).

    clamped_swiglu: (up + offset) * gate * sigmoid(alpha * gate), with gate at most `limit` and up
    within -limit..limit. clamped_silu: up, so limited, times silu(gate), which is at most `limit`.

    bias: whether the projections have a bias; "down": only that one.
    alpha: alpha of clamped_swiglu.
    limit: limit of clamped_swiglu and clamped_silu.
    offset: offset of clamped_swiglu.
    sparsity: share of the gate's numbers that become 0, were they normally distributed: what is
        below mean + deviation * quantile(sparsity) does, and the rest is reduced by it (Gemma 3n).
    threshold: that quantile itself, instead of the share; none: as `sparsity` says.
    bounded: whether each projection clips its inputs and outputs to bounds of the checkpoint,
        `ffn.up.input_min`, `ffn.up.output_max` and so on.
    """

    kind: Literal["gated"]
    inputs: int = dim("hidden")
    width: int = dim("intermediate", axis="mlp")
    activation: GatedActivation = "silu"
    bias: bool | Literal["down"] = False
    alpha: Positive = SWIGLU_ALPHA
    limit: Positive = SWIGLU_LIMIT
    offset: NotNegative = SWIGLU_OFFSET
    sparsity: Fraction = 0.0
    threshold: float | None = None
    bounded: bool = False

    def check(self) -> tuple[str, str] | None:
        if self.sparsity == 1:
            return "sparsity", "1 would leave nothing"
        if self.sparsity and self.threshold is not None:
            return "threshold", "says the same as sparsity; leave one of them out"
        return _unused_clamp(self)

    def undividable(self) -> str:
        if self.deviations is None:
            return ""
        return "its sparsity depends on all of its width; divide by layers"

    @property
    def deviations(self) -> float | None:
        """How many above the mean a number of the gate has to be; None: all count."""
        if self.threshold is not None or not self.sparsity:
            return self.threshold
        return NormalDist().inv_cdf(self.sparsity)


@dataclass(frozen=True, kw_only=True)
class MoESpec(Block):
    """Mixture of experts: a router selects `top_k` of them for each token (arXiv 1701.06538).

    The output is the weighted sum of the selected experts' outputs. An expert is a `gated`
    feed-forward or, with `gated = false`, an `mlp`. Shared experts, which see every token, are a
    module of their own in the formula: `x + ffn(n) + shared_expert(n)`.

    experts: number of experts.
    top_k: number of experts selected for a token.
    width: intermediate size of an expert.
    alpha: alpha of clamped_swiglu, as in `gated`.
    limit: limit of clamped_swiglu and clamped_silu, as in `gated`.
    offset: offset of clamped_swiglu, as in `gated`.
    bias: whether the experts' projections have a bias.
    router_bias: whether the router's projection has a bias.
    router_softcap: logits become router_softcap * tanh(logits / router_softcap).
    scoring: "softmax" over all experts; "sigmoid" of each (arXiv 2412.19437); "sparsemixer" (arXiv
        2409.12136) selects experts one after the other, each weighted by a softmax over the
        remaining scores near the maximum.
    renormalize: the weights are divided by their sum. With "softmax" that equals a softmax over the
        selected experts only.
    scale: factor of the weights.
    correction_bias: a bias of the scores, `router.correction`, that counts for the selection but
        not for the weights (arXiv 2408.15664); "logits": a bias of the router's logits likewise.
    expert_scale: whether a learned factor of each expert, `router.scale`, multiplies the weights.
    routed: "apart": the router is given vectors of its own, `moe(x, for_router)`.
    weighted: whether the weights multiply the experts' outputs or, "input", what they are given.
    identity_experts: further experts that the router can select, whose output is their input.
    groups: number of groups of equal size that the experts form.
    top_k_groups: number of groups that are selected first, by their score.
    group_score: a group's score: its greatest ("max"), or the sum of its two greatest ("top_2").
    jitter_eps: "sparsemixer": scores within twice this fraction of the maximum are near it.
    """

    kind: Literal["moe"]
    inputs: int = dim("hidden")
    experts: int = dim("experts")
    top_k: int = dim("top_k")
    width: int = dim("expert_intermediate", axis="mlp")
    gated: bool = True
    activation: GatedActivation = "silu"
    alpha: Positive = SWIGLU_ALPHA
    limit: Positive = SWIGLU_LIMIT
    offset: NotNegative = SWIGLU_OFFSET
    bias: bool = False
    router_bias: bool = False
    router_softcap: Positive | None = None
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    renormalize: bool = False
    scale: Positive = 1.0
    correction_bias: bool | Literal["logits"] = False
    expert_scale: bool = False
    routed: Literal["together", "apart"] = "together"
    weighted: Literal["output", "input"] = "output"
    identity_experts: Count = 0
    groups: Size = 1
    top_k_groups: Size = 1
    group_score: Literal["max", "top_2"] = "max"
    jitter_eps: NotNegative = 0.01

    def check(self) -> tuple[str, str] | None:
        if not self.gated and self.activation in CLAMPED:
            return "activation", f"{self.activation} is for gated experts"
        if self.experts % self.groups:
            return "groups", f"{self.groups} does not divide experts = {self.experts}"
        if self.top_k_groups > self.groups:
            return "top_k_groups", f"{self.top_k_groups} is more than groups = {self.groups}"
        left = self.experts // self.groups * self.top_k_groups
        if self.top_k > left:
            return "top_k", f"{self.top_k} is more than the {left} experts to choose from"
        if self.group_score == "top_2" and self.experts < 2 * self.groups:
            return "group_score", "top_2 needs groups of two experts or more"
        if self.identity_experts and (self.groups > 1 or self.weighted == "input"):
            return "identity_experts", "excludes groups and weights on the input"
        if self.scoring == "sparsemixer" and (self.correction_bias or self.groups > 1):
            return "scoring", "sparsemixer has neither a correction_bias nor groups"
        return _unused_clamp(self)

    def arguments(self) -> tuple[ArrayKind, ...]:
        return ("vectors", "vectors") if self.routed == "apart" else ("vectors",)

    def undividable(self) -> str:
        whole = "has identity experts, whose output every device has whole; divide by layers"
        return whole if self.identity_experts else ""


def _unused_clamp(block: GatedMLPSpec | MoESpec) -> tuple[str, str] | None:
    """The error for numbers of an activation that the block does not have."""
    numbers = {"alpha": SWIGLU_ALPHA, "limit": SWIGLU_LIMIT, "offset": SWIGLU_OFFSET}
    for name, usual in numbers.items():
        has = CLAMPED if name == "limit" else CLAMPED[:1]
        if block.activation not in has and getattr(block, name) != usual:
            return name, f"is of {' and '.join(has)}, but the activation is {block.activation}"
    return None

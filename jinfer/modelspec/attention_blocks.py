"""Attention blocks: multi-head, grouped-query, cross- and multi-head latent attention (MLA)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jinfer.modelspec.block import ArrayKind, Block, CachedKV
from jinfer.modelspec.bounded_types import Count, NotNegative, Positive, Size, dim
from jinfer.modelspec.feed_forward_blocks import Activation, MoESpec
from jinfer.modelspec.position_blocks import (
    AlibiSpec,
    DisentangledSpec,
    GridRopeSpec,
    RelativeBiasSpec,
    RopeSpec,
)
from jinfer.modelspec.spec_errors import show_value


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


def _check_bias(bias: bool | str) -> tuple[str, str] | None:
    if isinstance(bias, str) and not set(bias) <= set("qkvo"):
        return "bias", f"{bias!r} is not true, false or letters of 'qkvo'"
    return None


def _drop_neutral_temperature(block: AttentionSpec | LatentAttentionSpec) -> None:
    """Config files say in several ways that nothing is scaled; equal models compare equal."""
    rule = block.temperature
    if rule is not None and rule.beta == 0 and rule.power is None:
        object.__setattr__(block, "temperature", None)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(Block):
    """Self-attention with `heads` query heads that share `kv_heads` key and value heads (GQA).

    value_dim: dimensions of each value head; none: head_dim.
    bias: which projections have a bias: true or false for all, or letters of "qkvo".
    window: sliding window: number of tokens that a token attends to, including itself; none: all
        before it. In an encoder as many after it as before it.
    causal: of an encoder: whether a token attends to those before it only, as in a decoder.
    grid_window: of an image encoder: number of patches on a side of the windows into which a grid
        is divided: a patch attends to those of its own window only.
    chunk: number of tokens in a chunk: a token attends to those before it in its own chunk only.
    scale: scale of the scores; none: 1 / sqrt(head_dim).
    qk_norm: normalization of queries and keys, `attn.q_norm` and `attn.k_norm`.
    softcap: scores become softcap * tanh(scores / softcap).
    clip: queries, keys and values are clipped to -clip..clip.
    sinks: attention sinks: a learned score per head, `attn.sinks`, in the softmax without a value.
    temperature: factor of the queries that grows with the position.
    out_norm: normalization of the heads' outputs, `attn.out_norm`, before the gate and `o`.
    gate: gate on the heads' outputs, `attn.gate`, before `o`.
    differential: half of the heads are subtracted from the others.
    v_norm: normalization of the values, `attn.v_norm`.
    tied_values: the values are the keys before their norm and rotation; there is no `v`.
    kv_layer: number of an earlier layer, whose attention of the same name has the keys and values
        (KV sharing, arXiv 2405.12981); none: it has its own.
    indexer: sparse attention: what chooses the keys of each query, `attn.indexer`.
    low_rank: rank of two matrices added to each of `q`, `k` and `v`, `attn.q_low.down` and
        `attn.q_low.up` and so on: q(x) + up(down(x)); none: there are none.
    bounded: whether each projection clips its inputs and outputs to bounds of the checkpoint,
        `attn.q.input_min`, `attn.q.output_max` and so on.
    """

    kind: Literal["attention"]
    inputs: int = dim("hidden")
    outputs: int = dim("hidden")
    heads: int = dim("heads", axis="heads")
    kv_heads: int = dim("kv_heads", axis="kv_heads")
    head_dim: int = dim("head_dim")
    value_dim: Size | None = None
    position: RopeSpec | AlibiSpec | RelativeBiasSpec | DisentangledSpec | GridRopeSpec | None = (
        None
    )
    bias: bool | str = False
    window: Size | None = None
    causal: bool = False
    grid_window: Size | None = None
    chunk: Size | None = None
    scale: Positive | None = None
    qk_norm: QKNormSpec | None = None
    softcap: Positive | None = None
    clip: Positive | None = None
    sinks: bool = False
    temperature: TemperatureSpec | None = None
    out_norm: HeadNormSpec | None = None
    gate: OutputGateSpec | None = None
    differential: DifferentialSpec | None = None
    v_norm: HeadNormSpec | None = None
    tied_values: bool = False
    kv_layer: Count | None = None
    indexer: IndexerSpec | None = None
    low_rank: Size | None = None
    bounded: bool = False

    def __post_init__(self) -> None:
        _drop_neutral_temperature(self)

    def check(self) -> tuple[str, str] | None:
        if self.heads % self.kv_heads:
            return "kv_heads", f"{self.kv_heads} does not divide heads = {self.heads}"
        if wrong := _check_bias(self.bias):
            return wrong
        if isinstance(self.position, RopeSpec) and self.position.dim > self.head_dim:
            return "position.dim", f"{self.position.dim} is more than head_dim = {self.head_dim}"
        if isinstance(self.position, GridRopeSpec) and self.position.dim != self.head_dim:
            return "position.dim", f"{self.position.dim} is not head_dim = {self.head_dim}"
        if self.chunk is not None and self.window is not None:
            return "chunk", "excludes a window"
        if self.chunk is not None and not isinstance(self.position, RopeSpec | None):
            return "chunk", f"excludes {self.position.kind} positions"
        if self.tied_values and (self.kv_layer is not None or self.value_width != self.head_dim):
            return "tied_values", "needs keys of its own, as wide as the values"
        if self.kv_layer is not None and (self.differential is not None or self.v_norm is not None):
            return "kv_layer", "excludes differential and v_norm"
        if self.differential is not None and (self.kv_heads % 2 or self.out_norm or self.gate):
            return "differential", "needs an even number of kv_heads, neither out_norm nor gate"
        if self.indexer is not None and (self.window or self.chunk or self.kv_layer is not None):
            return "indexer", "excludes window, chunk and kv_layer"
        if self.indexer is not None and not isinstance(self.position, RopeSpec | None):
            return "indexer", f"excludes {self.position.kind} positions"
        return None

    @property
    def own_indexer(self) -> IndexerSpec | None:
        """Its indexer, unless another layer's chooses the keys."""
        return None if self.indexer is None or self.indexer.shared else self.indexer

    @property
    def value_width(self) -> int:
        """Dimensions of each value head."""
        return self.value_dim or self.head_dim

    def cached(self) -> CachedKV | None:
        if self.kv_layer is not None:
            return None
        width = self.value_width * (2 if self.differential is not None else 1)
        index = self.own_indexer.head_dim if self.own_indexer is not None else 0
        window = self.window or self.chunk
        biased = not isinstance(self.position, RopeSpec | None)
        return CachedKV(
            self.kv_heads,
            self.head_dim,
            width,
            window,
            index_width=index,
            score_mod=biased or self.softcap is not None or self.chunk is not None,
        )

    def misplaced(self, stack: str, part: str) -> str:
        if self.causal and stack == "decoder":
            return "an attention with causal = true, which is for an encoder: a decoder's always is"
        if self.chunk is not None and stack != "decoder":
            return "an attention in chunks, which only a decoder can"
        if self.kv_layer is not None and (stack, part) != ("decoder", "layer"):
            return "an attention to another's keys, which only the layers of a decoder can"
        if self.indexer is not None and stack != "decoder":
            return "an attention with an indexer, which only a decoder can"
        if isinstance(self.position, DisentangledSpec) and stack != "encoder":
            return "an attention with disentangled positions, which only an encoder can"
        on_grid = isinstance(self.position, GridRopeSpec) or self.grid_window is not None
        if on_grid and stack != "vision":
            return "an attention on a grid, which only [vision] can"
        return ""

    def undividable(self) -> str:
        if self.differential is not None:
            return "half of its heads are subtracted from the others; divide by layers"
        norms = self.qk_norm, self.out_norm, self.v_norm
        if any(norm is not None and norm.over == "width" for norm in norms):
            return (
                "its norm is over all heads together, so its heads cannot be "
                "divided; divide by layers"
            )
        return ""

    def shares_with(self, owner: Block | None) -> bool:
        """Whether it can attend to the keys and values of another attention."""
        if not isinstance(owner, AttentionSpec):
            return False
        fields = ("kv_heads", "head_dim", "value_width", "window", "chunk", "position", "indexer")
        return all(getattr(self, field) == getattr(owner, field) for field in fields)

    def has_bias(self, projection: str) -> bool:
        """Whether projection "q", "k", "v" or "o" has a bias."""
        return projection in self.bias if isinstance(self.bias, str) else self.bias


@dataclass(frozen=True, kw_only=True)
class ExpertAttentionSpec(AttentionSpec):
    """Mixture of attention heads, MoA (arXiv 2210.05144), over keys and values that all share.

    A router selects `top_k` of the experts for each token. An expert has a query head for each key
    head, and a matrix of `o`; the outputs are weighted by a softmax over the selected experts.

    experts: number of experts.
    top_k: number of experts selected for a token; `heads` is that times `kv_heads`.
    """

    kind: Literal["expert_attention"]  # type: ignore[assignment]
    experts: int = dim("experts")
    top_k: int = dim("top_k")

    def check(self) -> tuple[str, str] | None:
        if self.heads != self.top_k * self.kv_heads:
            return "heads", f"{self.heads} is not top_k * kv_heads = {self.top_k * self.kv_heads}"
        if self.top_k > self.experts:
            return "top_k", f"{self.top_k} is more than experts = {self.experts}"
        if not (self.bias is False or self.bias == "o"):
            return "bias", f"{show_value(self.bias)} is not false or 'o'"
        for name in ("gate", "out_norm", "differential", "v_norm", "kv_layer", "clip", "low_rank"):
            if getattr(self, name) is not None:
                return name, "is not for a mixture of heads"
        if self.tied_values or self.sinks or not isinstance(self.position, RopeSpec | None):
            return "position", "a mixture of heads has rope or none, no tied_values and no sinks"
        return super().check()

    @property
    def routing(self) -> MoESpec:
        """How experts are selected."""
        return MoESpec(
            kind="moe",
            inputs=self.inputs,
            experts=self.experts,
            top_k=self.top_k,
            width=1,
            renormalize=True,
        )

    def undividable(self) -> str:
        return "the heads of its experts are not divided; divide by layers"


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(Block):
    """Cross-attention of a decoder over the encoder's output: `cross(x, encoded)`.

    encoded: width of the encoder's output.
    kv_heads: number of key and value heads; none: heads.
    bias: which projections have a bias: true or false for all, or letters of "qkvo".
    scale: scale of the scores; none: 1 / sqrt(head_dim).
    softcap: scores become softcap * tanh(scores / softcap).
    """

    kind: Literal["cross_attention"]
    inputs: int = dim("hidden")
    encoded: int = dim("hidden")
    heads: int = dim("heads", axis="heads")
    kv_heads: Size | None = field(default=None, metadata={"axis": "kv_heads"})
    head_dim: int = dim("head_dim")
    bias: bool | str = False
    scale: Positive | None = None
    softcap: Positive | None = None
    takes: ClassVar[tuple[ArrayKind, ...]] = ("vectors", "encoded")

    def check(self) -> tuple[str, str] | None:
        if self.heads % self.keys:
            return "kv_heads", f"{self.keys} does not divide heads = {self.heads}"
        return _check_bias(self.bias)

    @property
    def keys(self) -> int:
        """Number of key and value heads."""
        return self.kv_heads or self.heads

    def cached(self) -> CachedKV:
        return CachedKV(self.keys, self.head_dim, self.head_dim, encoded=True)

    def has_bias(self, projection: str) -> bool:
        """Whether projection "q", "k", "v" or "o" has a bias."""
        return projection in self.bias if isinstance(self.bias, str) else self.bias


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(Block):
    """Multi-head latent attention, MLA (arXiv 2405.04434).

    position: none: the part of queries and keys that is `rope_dim` wide is not rotated.
    latent_rank: width of the cached latent (kv_lora_rank).
    query_rank: width of the queries' latent (q_lora_rank); none: queries come from the input.
    nope_dim: dimensions of each query and key head without rotary embedding.
    rope_dim: dimensions of each query and key head with rotary embedding.
    value_dim: dimensions of each value head.
    bias: whether the projections to the latents and the output have a bias.
    eps: epsilon of the latents' norms.
    scale: scale of the scores; none: 1 / sqrt(nope_dim + rope_dim).
    latent_scale: factor of the cached latent, after its norm.
    split: whether the up-projection of the latent is stored as two, for keys and for values, with a
        matrix per head.
    sinks: attention sinks: a learned score per head, `attn.sinks`, in the softmax without a value.
    temperature: factor of the queries that grows with the position.
    gate: gate on the heads' outputs, `attn.gate`, before `o`.
    indexer: sparse attention: what chooses the keys of each query, `attn.indexer`.
    """

    kind: Literal["latent_attention"]
    position: RopeSpec | None
    inputs: int = dim("hidden")
    heads: int = dim("heads", axis="heads")
    latent_rank: int = dim("latent_rank")
    query_rank: Size | None = None
    nope_dim: int = dim("nope_dim")
    rope_dim: int = dim("rope_dim")
    value_dim: int = dim("value_dim")
    bias: bool = False
    eps: NotNegative = 1e-6
    scale: Positive | None = None
    latent_scale: Positive = 1.0
    split: bool = False
    sinks: bool = False
    temperature: TemperatureSpec | None = None
    gate: OutputGateSpec | None = None
    indexer: IndexerSpec | None = None

    def __post_init__(self) -> None:
        _drop_neutral_temperature(self)

    def check(self) -> tuple[str, str] | None:
        if self.position is not None and self.position.dim != self.rope_dim:
            return "position.dim", f"{self.position.dim} is not rope_dim = {self.rope_dim}"
        return None

    @property
    def own_indexer(self) -> IndexerSpec | None:
        """Its indexer, unless another layer's chooses the keys."""
        return None if self.indexer is None or self.indexer.shared else self.indexer

    def cached(self) -> CachedKV:
        index = self.own_indexer.head_dim if self.own_indexer is not None else 0
        return CachedKV(1, self.latent_rank + self.rope_dim, 0, index_width=index)

    def misplaced(self, stack: str, part: str) -> str:
        needs = "a latent attention, which only a decoder can: it needs a cache"
        return "" if stack == "decoder" else needs

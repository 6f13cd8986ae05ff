"""Recurrent blocks (state space models, linear attention): what a layer keeps of all tokens so far.

Each is a recurrence alone; projections, gates and norms around it are modules of their own, wired
by the layer's formula. Their state is float32; each sequence has one, apart from the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jinfer.modelspec.block import ArrayKind, Block, CachedState
from jinfer.modelspec.bounded_types import NotNegative, Positive, Size, dim
from jinfer.modelspec.feed_forward_blocks import Activation


@dataclass(frozen=True, kw_only=True)
class RecurrentBlock(Block):
    """A block with a state."""

    def cached(self) -> CachedState:
        raise NotImplementedError

    def misplaced(self, stack: str, part: str) -> str:
        if (stack, part) == ("decoder", "layer"):
            return ""
        return "a recurrent block, which only a layer of a decoder can"


@dataclass(frozen=True, kw_only=True)
class ConvSpec(RecurrentBlock):
    """Short causal convolution, depthwise: `conv(x)` of the last `kernel` inputs.

    bias: whether there is a bias.
    activation: what is applied to the result; none: nothing.
    """

    kind: Literal["conv"]
    size: int = dim("hidden")
    kernel: Size = 4
    bias: bool = False
    activation: Activation | None = None

    def cached(self) -> CachedState:
        return CachedState((("inputs", (self.kernel - 1, self.size)),))


@dataclass(frozen=True, kw_only=True)
class SSMSpec(RecurrentBlock):
    """State space of Mamba-2 (SSD, arXiv 2405.21060): `ssm(x, b, c, dt)`.

    S = exp(dt a) S + b (dt x), and the output is c S + d x, for each of `heads` heads; x and dt are
    those of a head, b and c those of a group of heads. dt is softplus(dt + dt_bias), and a is
    -exp(a_log).

    width: of all heads.
    stored: whether the parameter `a_log` is stored so ("log"), or as a itself ("value").
    least: dt is not less.
    """

    kind: Literal["ssm"]
    width: int = dim("ssm_width")
    heads: int = dim("ssm_heads")
    groups: int = dim("ssm_groups")
    states: int = dim("ssm_states")
    stored: Literal["log", "value"] = "log"
    least: NotNegative = 0.0
    takes: ClassVar[tuple[ArrayKind, ...]] = ("vectors",) * 4

    def check(self) -> tuple[str, str] | None:
        if self.width % self.heads:
            return "heads", f"{self.heads} does not divide width = {self.width}"
        if self.heads % self.groups:
            return "groups", f"{self.groups} does not divide heads = {self.heads}"
        return None

    def cached(self) -> CachedState:
        return CachedState((("state", (self.heads, self.states, self.width // self.heads)),))


@dataclass(frozen=True, kw_only=True)
class SelectiveScanSpec(RecurrentBlock):
    """State space of Mamba-1 (selective scan, arXiv 2312.00752): `scan(x, b, c, dt)`.

    h = exp(dt a) h + b (dt x), and the output is c h + d x, for each of `width` channels. dt is
    softplus(dt + dt_bias), and a is -exp(a_log).

    stored: whether the parameter `a_log` is stored so ("log"), or as a itself ("value").
    """

    kind: Literal["selective_scan"]
    width: int = dim("ssm_width")
    states: int = dim("ssm_states")
    stored: Literal["log", "value"] = "log"
    takes: ClassVar[tuple[ArrayKind, ...]] = ("vectors",) * 4

    def cached(self) -> CachedState:
        return CachedState((("state", (self.states, self.width)),))


@dataclass(frozen=True, kw_only=True)
class DeltaSpec(RecurrentBlock):
    """Gated delta rule (arXiv 2412.06464, 2510.26692): `delta(q, k, v, decay, beta)`.

    S = exp(g) S; S = S + k beta (v - k S), and the output is q S. Queries and keys are normalized
    to length 1, queries divided by sqrt(key_dim) too; beta is `beta_scale` sigmoid(beta). The log
    decay g is -exp(a_log) softplus(decay + dt_bias), or, with `lower`, lower sigmoid(exp(a_log)
    (decay + dt_bias)).

    key_heads: heads of queries and keys, each for several heads of values.
    repeat: those are consecutive ("interleave", as NumPy's repeat), or every key_heads-th ("tile").
    channels: a decay for each channel of a key (Kimi Delta Attention), not one a head.
    lower: lower bound of the log decay; none: unbounded.
    stored: whether the parameter `a_log` is stored so ("log"), or as -exp(a_log) ("value").
    """

    kind: Literal["delta"]
    heads: int = dim("delta_heads")
    key_heads: int = dim("delta_key_heads")
    key_dim: int = dim("delta_key_dim")
    value_dim: int = dim("delta_value_dim")
    channels: bool = False
    lower: float | None = None
    beta_scale: Positive = 1.0
    repeat: Literal["interleave", "tile"] = "interleave"
    stored: Literal["log", "value"] = "log"
    takes: ClassVar[tuple[ArrayKind, ...]] = ("vectors",) * 5

    def check(self) -> tuple[str, str] | None:
        if self.heads % self.key_heads:
            return "key_heads", f"{self.key_heads} does not divide heads = {self.heads}"
        return None

    def cached(self) -> CachedState:
        return CachedState((("state", (self.heads, self.key_dim, self.value_dim)),))


@dataclass(frozen=True, kw_only=True)
class RGLRUSpec(RecurrentBlock):
    """RG-LRU (arXiv 2402.19427): `rglru(x, input_gate, recurrence_gate)`, gates after sigmoids.

    h = a h + sqrt(1 - a^2) (input_gate x), which is the output, with log a = -8 recurrence_gate
    softplus(decay).
    """

    kind: Literal["rglru"]
    width: int = dim("lru_width")
    takes: ClassVar[tuple[ArrayKind, ...]] = ("vectors",) * 3

    def cached(self) -> CachedState:
        return CachedState((("state", (self.width,)),))


@dataclass(frozen=True, kw_only=True)
class LinearAttentionSpec(RecurrentBlock):
    """Linear attention with a fixed decay a head (lightning attention, arXiv 2405.17381).

    S = exp(-slope) S + k v, and the output is q S. The slope of head h is 2^(-8 (h + 1) / heads),
    times `slope`.
    """

    kind: Literal["linear_attention"]
    heads: int = dim("heads")
    head_dim: int = dim("head_dim")
    slope: Positive = 1.0
    takes: ClassVar[tuple[ArrayKind, ...]] = ("vectors",) * 3

    def cached(self) -> CachedState:
        return CachedState((("state", (self.heads, self.head_dim, self.head_dim)),))


@dataclass(frozen=True, kw_only=True)
class ShiftSpec(RecurrentBlock):
    """Token shift (RWKV): `shift(x)` is x of the token before, and zero for the first one."""

    kind: Literal["shift"]
    size: int = dim("hidden")

    def cached(self) -> CachedState:
        return CachedState((("inputs", (1, self.size)),))


@dataclass(frozen=True, kw_only=True)
class WKVSpec(RecurrentBlock):
    """Time mixing of RWKV-4 (arXiv 2305.13048): `wkv(k, v)`.

    The output is the mean of all values so far, weighted by exp(k) and by exp(-exp(decay)) for each
    token since; the token itself has exp(k + bonus).
    """

    kind: Literal["wkv"]
    width: int = dim("hidden")
    takes: ClassVar[tuple[ArrayKind, ...]] = ("vectors", "vectors")

    def cached(self) -> CachedState:
        return CachedState((("state", (3, self.width)),))


@dataclass(frozen=True, kw_only=True)
class WKV7Spec(RecurrentBlock):
    """Time mixing of RWKV-7 (arXiv 2503.14456): `wkv7(r, decay, k, v, removal, rate)`.

    S = w S - (removal rate) (removal S) + k v, and the output is r S, for each head. w is
    exp(-exp(-1/2) sigmoid(decay)); removal is normalized to length 1 in each head.
    """

    kind: Literal["wkv7"]
    heads: int = dim("heads")
    key_dim: int = dim("head_dim")
    value_dim: int = dim("head_dim")
    takes: ClassVar[tuple[ArrayKind, ...]] = ("vectors",) * 6

    def cached(self) -> CachedState:
        return CachedState((("state", (self.heads, self.key_dim, self.value_dim)),))


@dataclass(frozen=True, kw_only=True)
class BonusSpec(Block):
    """The bonus of a token's own value in RWKV-7 (arXiv 2503.14456): `bonus(r, k, v)`.

    v times the sum of r k weight in each head.
    """

    kind: Literal["bonus"]
    heads: int = dim("heads")
    key_dim: int = dim("head_dim")
    takes: ClassVar[tuple[ArrayKind, ...]] = ("vectors",) * 3

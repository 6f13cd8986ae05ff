"""Position encodings: RoPE and its scaling, ALiBi, relative, learned and sinusoidal positions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jinfer.modelspec.block import ArrayKind, Block
from jinfer.modelspec.bounded_types import Count, Fraction, NotNegative, Positive, Size, dim

# Keys of the table of scaling that are for other parts of a specification.
_SAID_ELSEWHERE = (
    *("rope_theta", "partial_rotary_factor", "finetuned", "max_position_embeddings"),
    "llama_4_scaling_beta",
)
_STRETCHED = ("linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True, kw_only=True)
class RopeScalingSpec:
    """RoPE scaling: rotary frequencies for contexts longer than the trained one.

    The keys are those of `rope_scaling` in a config.json, which can be used here as a whole.

    rope_type: "linear" is position interpolation (arXiv 2306.15595), "yarn" arXiv 2309.00071,
        "llama3" the rule of Llama 3.1, "longrope" arXiv 2402.13753, "dynamic" increases theta with
        the length of the sequence, "proportional" turns only the first pairs; "default", "none"
        "mrope" and an empty table change nothing.
    factor: how many times longer the context is than trained; not needed by longrope.
    original_max_position_embeddings: the trained context; for all but linear.
    low_freq_factor: llama3: pairs with fewer turns than this are stretched by `factor`.
    high_freq_factor: llama3: pairs with more turns than this are unchanged.
    attention_factor: yarn, longrope: multiplies cos and sin; none: yarn's from `factor` and the two
        mscales, longrope's sqrt(1 + ln(factor) / ln(original_max_position_embeddings)).
    beta_fast: yarn: pairs with more turns than this in the trained context are unchanged.
    beta_slow: yarn: pairs with fewer turns than this are stretched by `factor`.
    mscale: yarn: weight of the attention temperature, as in DeepSeek.
    mscale_all_dim: yarn: the same, as a divisor.
    truncate: yarn: whether the bounds between unchanged and stretched pairs are rounded.
    short_factor: longrope: divisors of each pair's frequency; none: 1.
    long_factor: longrope: the same if the engine's context is longer than trained.
    partial_rotary_factor: proportional: the share of the pairs that turn.
    length: longrope: the longest sequence; default: the engine's context.
    mrope_section: as `sections` of rope.
    mrope_interleaved: as `interleaved` of rope.
    """

    rope_type: Literal[
        "default",
        "none",
        "mrope",
        "linear",
        "llama3",
        "yarn",
        "longrope",
        "dynamic",
        "proportional",
    ] = "default"
    factor: Positive = 1.0
    original_max_position_embeddings: int = dim("context")
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    attention_factor: NotNegative | None = None
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: NotNegative | None = None
    mscale_all_dim: NotNegative | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    partial_rotary_factor: Fraction = 1.0
    length: Size | None = field(default=None, metadata={"served": True})
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool = False

    ALIASES: ClassVar[dict[str, str]] = {"type": "rope_type"}

    def __post_init__(self) -> None:
        if self.rope_type != "longrope":
            object.__setattr__(self, "length", None)

    @classmethod
    def ignored(cls, table: Mapping[str, Any]) -> frozenset[str]:
        """Keys that config files have in the same table, but specifications elsewhere."""
        elsewhere = {*_SAID_ELSEWHERE}
        # A specification may have it among alternatives.
        if "proportional" in str(table.get("rope_type", table.get("type"))):
            elsewhere.remove("partial_rotary_factor")
        return frozenset(elsewhere)

    def check(self) -> tuple[str, str] | None:
        if self.high_freq_factor <= self.low_freq_factor:
            return "high_freq_factor", "must be above low_freq_factor"
        for name in ("short_factor", "long_factor"):
            if min(getattr(self, name) or (1.0,)) <= 0:
                return name, "has a number that is not above 0"
        return None

    def lacks(self, given: Collection[str]) -> tuple[str, str] | None:
        """The error for keys that the given ones require; None if complete."""
        if given and "rope_type" not in given:
            return "rope_type", "is missing: how do the other keys change the frequencies?"
        if self.rope_type in _STRETCHED and "factor" not in given:
            return "factor", f"is missing, which {self.rope_type} needs"
        return None


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding, RoPE (arXiv 2104.09864), on the first `dim` dimensions of a head.

    pairs: "halves" rotates (i, i + dim/2) together, "adjacent" (2i, 2i+1).
    factors: the checkpoint has a tensor of dim/2 divisors of the frequencies.
    backward: whether the angles are negative.
    sections: M-RoPE (arXiv 2409.12191): how many pairs turn by a token's time, its row and its
        column in an image; three equal positions, as text has, are ordinary RoPE.
    interleaved: whether the pairs of the sections alternate; otherwise they follow one another.
    """

    kind: Literal["rope"]
    theta: Positive = 10000.0
    pairs: Literal["halves", "adjacent"] = "halves"
    dim: int = dim("head_dim")
    scaling: RopeScalingSpec | None = None
    factors: bool = False
    backward: bool = False
    sections: tuple[int, ...] | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        scaling = self.scaling
        if scaling is not None and self.sections is None and scaling.mrope_section is not None:
            object.__setattr__(self, "sections", scaling.mrope_section)
            object.__setattr__(self, "interleaved", scaling.mrope_interleaved)
        # Config files say in several ways that nothing is scaled; equal models compare equal.
        if scaling is not None and scaling.rope_type in ("default", "none", "mrope"):
            object.__setattr__(self, "scaling", None)

    @property
    def has_grid(self) -> bool:
        """Whether tokens may have positions on a grid."""
        return len(self.sections or ()) == 3 and sum(self.sections or ()) == self.dim // 2

    def check(self) -> tuple[str, str] | None:
        if self.dim % 2:
            return "dim", f"{self.dim} is odd, but dimensions are rotated in pairs"
        if self.theta <= 1:
            return "theta", f"{self.theta} is not above 1"
        for name in ("short_factor", "long_factor") if self.scaling is not None else ():
            factors = getattr(self.scaling, name)
            if factors is not None and len(factors) != self.dim // 2:
                reason = f"has {len(factors)} numbers for {self.dim // 2} pairs"
                return f"scaling.{name}", reason
        return None


@dataclass(frozen=True, kw_only=True)
class GridRopeSpec:
    """Rotary position embedding in two dimensions, by the row and the column of a patch.

    Half of the pairs are rotated by one coordinate, half by the other; tokens that are no patches
    are not rotated. Only for an image encoder.

    pairs: "halves" rotates (i, i + dim/2) together, "adjacent" (2i, 2i+1), "quarters" (i, i +
        dim/4) in each half of the head.
    order: which coordinate comes first.
    interleaved: whether pairs of both coordinates alternate; else those of the first come first.
    shifted: whether frequencies of the second coordinate lie between those of the first: of the
        series of theta, the first has the even ones and the second the odd ones; else both have the
        even ones.
    offset: added to both coordinates.
    """

    kind: Literal["grid_rope"]
    theta: Positive = 10000.0
    pairs: Literal["halves", "adjacent", "quarters"] = "halves"
    dim: int = dim("head_dim")
    order: Literal["row", "column"] = "row"
    interleaved: bool = False
    shifted: bool = False
    offset: Count = 0

    def check(self) -> tuple[str, str] | None:
        if self.dim % 4:
            return "dim", f"{self.dim} is no multiple of 4, for pairs of two coordinates"
        if self.pairs == "quarters" and (self.interleaved or self.shifted):
            return "pairs", '"quarters" excludes interleaved and shifted'
        return None


@dataclass(frozen=True, kw_only=True)
class AlibiSpec:
    """ALiBi: attention with linear biases (arXiv 2108.12409).

    max_bias: the exponents of the slopes' series end there.
    factor: factor of the slopes; for a model that adds biases before it scales scores, the scale.

    Head counts that are no power of two use the series of the power of two below, then every other
    slope of the next one's.
    """

    kind: Literal["alibi"]
    max_bias: Positive = 8.0
    factor: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class RelativeBiasSpec:
    """Relative position bias, learned per head and bucket of distance (T5, arXiv 1910.10683).

    buckets: rows of the table.
    max_distance: all distances from here on share a bucket.
    """

    kind: Literal["relative"]
    buckets: Size = 32
    max_distance: Size = 128

    def check(self) -> tuple[str, str] | None:
        if self.buckets % 4 or self.max_distance <= self.buckets:
            return "buckets", "must be a multiple of 4 below max_distance"
        return None


@dataclass(frozen=True, kw_only=True)
class DisentangledSpec:
    """Disentangled attention of DeBERTa: learned vectors of relative positions (arXiv 2006.03654).

    The score of query q and key k is increased by q . K(r) and Q(r) . k, where r is the vector of
    their distance, `attn.distances`, after a layer norm, `attn.distances.norm`, and K and Q are the
    attention's own projections. Only for an encoder.

    buckets: distances distinguished on either side, half of them exactly, the rest logarithmically.
    max_distance: all distances from here on share a bucket.
    eps: epsilon of the norm.
    exact: all `buckets` are distances of their own, and the larger ones share the last.
    norm: whether there is that norm.
    projections: "own": K and Q are `attn.distances.k`, without a bias, and `attn.distances.q`.
    """

    kind: Literal["disentangled"]
    buckets: Size = 256
    max_distance: int = dim("context")
    eps: NotNegative = 1e-7
    exact: bool = False
    norm: bool = True
    projections: Literal["shared", "own"] = "shared"

    def check(self) -> tuple[str, str] | None:
        if not self.exact and (self.buckets % 2 or self.max_distance <= self.buckets):
            return "buckets", "must be even and below max_distance"
        return None


@dataclass(frozen=True, kw_only=True)
class LearnedPositionsSpec(Block):
    """A learned table of absolute positions: `position(positions)`.

    offset: added to a position to find its row; the table has that many extra rows.
    """

    kind: Literal["learned_positions"]
    size: int = dim("context")
    width: int = dim("hidden")
    offset: Count = 0
    takes: ClassVar[tuple[ArrayKind, ...]] = ("indices",)


@dataclass(frozen=True, kw_only=True)
class SinusoidalPositionsSpec(Block):
    """Fixed sinusoidal positions, sines followed by cosines: `position(positions)`.

    If the checkpoint has a tensor of that name with other values, it is a learned table.

    offset: added to a position.
    frequencies: "standard": 10000^(-2j/width) (arXiv 1706.03762); "tensor2tensor": the series ends
        one step earlier, 10000^(-j/(width/2 - 1)).
    """

    kind: Literal["sinusoidal_positions"]
    width: int = dim("hidden")
    offset: Count = 0
    frequencies: Literal["standard", "tensor2tensor"] = "standard"
    takes: ClassVar[tuple[ArrayKind, ...]] = ("indices",)

    def check(self) -> tuple[str, str] | None:
        if self.width % 2 or self.width < 4:
            return "width", f"{self.width} is not an even number from 4 on"
        return None

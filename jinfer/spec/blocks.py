"""The building blocks a specification can name, as frozen dataclasses.

`kind = "..."` in a module's table picks the class; the other keys are its fields. A field left
out takes its default; a default written `dim("name")` is the value of that dimension in `[dims]`.
`check` says what is wrong with fields that do not fit each other, as (field, reason). How a block
computes is in `jinfer.nn`, under the same kind. The docstrings are part of docs/specs.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jinfer.spec.bounds import Count, NotNegative, Positive, Size

# Names of the same function in published config files, in brackets: silu (swish), gelu is the
# exact erf form, gelu_tanh its approximation (gelu_new, gelu_pytorch_tanh, gelu_fast).
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh"]
GatedActivation = Literal[Activation, "clamped_swiglu"]
ACTIVATION_ALIASES = {
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "relu_squared": "relu2",
}


def dim(name: str) -> Any:
    """A size whose default is a dimension of `[dims]`."""
    return field(metadata={"dim": name})


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How rotary frequencies are changed for contexts longer than trained.

    The keys are those of `rope_scaling` in a config.json, which can stand here whole.

    rope_type: "linear" is position interpolation (arXiv 2306.15595), "yarn" arXiv 2309.00071,
        "llama3" the rule of Llama 3.1; "default" and "none" change nothing.
    factor: how many times longer the context is than trained.
    original_max_position_embeddings: the context trained; for yarn and llama3.
    low_freq_factor: llama3: pairs that turn fewer times than this are stretched by `factor`.
    high_freq_factor: llama3: pairs that turn more often than this are kept.
    attention_factor: yarn: multiplies cos and sin; none: from `factor` and the two mscales.
    beta_fast: yarn: pairs that turn more often than this in the context trained are kept.
    beta_slow: yarn: pairs that turn fewer times than this are stretched by `factor`.
    mscale: yarn: weight of the attention's temperature, as DeepSeek has it.
    mscale_all_dim: yarn: the same, divided by.
    truncate: yarn: whether the bounds between kept and stretched are whole pairs.
    """

    rope_type: Literal["default", "none", "linear", "llama3", "yarn"]
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

    ALIASES: ClassVar[dict[str, str]] = {"type": "rope_type"}
    # Keys that config files keep in the same table; they are given elsewhere in a specification.
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"rope_theta", "partial_rotary_factor", "finetuned", "max_position_embeddings"}
    )

    def check(self) -> tuple[str, str] | None:
        if self.high_freq_factor <= self.low_freq_factor:
            return "high_freq_factor", "must be above low_freq_factor"
        return None


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions (arXiv 2104.09864) on the first `dim` of a head's dimensions.

    pairs: "halves" rotates (i, i + dim/2) together, "adjacent" (2i, 2i+1).
    factors: the checkpoint has a tensor of dim/2 numbers that the frequencies are divided by.
    """

    kind: Literal["rope"]
    theta: Positive = 10000.0
    pairs: Literal["halves", "adjacent"] = "halves"
    dim: int = dim("head_dim")
    scaling: Scaling | None = None
    factors: bool = False

    def __post_init__(self) -> None:
        # Config files say in several ways that nothing is scaled; equal models compare equal.
        if self.scaling is not None and self.scaling.rope_type in ("default", "none"):
            object.__setattr__(self, "scaling", None)

    def check(self) -> tuple[str, str] | None:
        if self.dim % 2:
            return "dim", f"{self.dim} is odd, but dimensions are rotated in pairs"
        if self.theta <= 1:
            return "theta", f"{self.theta} is not above 1"
        return None


@dataclass(frozen=True, kw_only=True)
class Alibi:
    """Attention with linear biases (arXiv 2108.12409).

    max_bias: the exponents of the slopes' series end there.

    Head counts that are no power of two take the series of the power of two below, then every
    other slope of the next one's.
    """

    kind: Literal["alibi"]
    max_bias: Positive = 8.0


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """A table of `size` rows: `embed(tokens)`."""

    kind: Literal["embedding"]
    size: int = dim("vocab")
    width: int = dim("hidden")


@dataclass(frozen=True, kw_only=True)
class LearnedPositions:
    """A learned table of positions: `position(positions)`.

    offset: what is added to a position to find its row; the table has that many rows more.
    """

    kind: Literal["learned_positions"]
    size: int = dim("context")
    width: int = dim("hidden")
    offset: Count = 0


@dataclass(frozen=True, kw_only=True)
class SinusoidalPositions:
    """Fixed positions, a block of sines then a block of cosines: `position(positions)`.

    offset: what is added to a position.
    frequencies: "standard" 10000^(-2j/width) (arXiv 1706.03762); "tensor2tensor" ends the
    series one step earlier, 10000^(-j/(width/2 - 1)).
    """

    kind: Literal["sinusoidal_positions"]
    width: int = dim("hidden")
    offset: Count = 0
    frequencies: Literal["standard", "tensor2tensor"] = "standard"

    def check(self) -> tuple[str, str] | None:
        if self.width % 2 or self.width < 4:
            return "width", f"{self.width} is not an even number from 4 on"
        return None


@dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467).

    plus_one: the factor is 1 + weight.
    """

    kind: Literal["rms"]
    size: int = dim("hidden")
    eps: NotNegative = 1e-6
    plus_one: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias (arXiv 1607.06450).

    weight: whether it has one.
    bias: whether it has one.
    plus_one: the factor is 1 + weight.
    """

    kind: Literal["layer"]
    size: int = dim("hidden")
    eps: NotNegative = 1e-5
    weight: bool = True
    bias: bool = True
    plus_one: bool = False


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A dense projection, weight [outputs, inputs]."""

    kind: Literal["linear"]
    inputs: int = dim("hidden")
    outputs: int = dim("hidden")
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Head:
    """The projection onto the vocabulary.

    tied: its weight is that of the module `embed`.
    """

    kind: Literal["head"]
    inputs: int = dim("hidden")
    outputs: int = dim("vocab")
    bias: bool = False
    tied: bool = False


@dataclass(frozen=True, kw_only=True)
class ActivationBlock:
    """An activation function alone."""

    kind: Literal["activation"]
    function: Activation = "gelu"


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Self-attention with `heads` query heads that share `kv_heads` key and value heads.

    bias: which projections have one: true or false for all, or letters of "qkvo".
    window: a token sees this many tokens, itself included; none: all before it.
    scale: of the scores; none: 1 / sqrt(head_dim).
    """

    kind: Literal["attention"]
    inputs: int = dim("hidden")
    heads: int = dim("heads")
    kv_heads: int = dim("kv_heads")
    head_dim: int = dim("head_dim")
    position: Rope | Alibi | None = None
    bias: bool | str = False
    window: Size | None = None
    scale: Positive | None = None

    def check(self) -> tuple[str, str] | None:
        if self.heads % self.kv_heads:
            return "kv_heads", f"{self.kv_heads} does not divide heads = {self.heads}"
        if isinstance(self.bias, str) and not set(self.bias) <= set("qkvo"):
            return "bias", f"{self.bias!r} is not true, false or letters of 'qkvo'"
        if isinstance(self.position, Rope) and self.position.dim > self.head_dim:
            return "position.dim", f"{self.position.dim} is more than head_dim = {self.head_dim}"
        return None

    def has_bias(self, projection: str) -> bool:
        """Whether projection "q", "k", "v" or "o" has a bias."""
        return projection in self.bias if isinstance(self.bias, str) else self.bias


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

    clamped_swiglu: (up + 1) * gate * sigmoid(1.702 * gate), gate at most 7, up within -7..7.
    """

    kind: Literal["gated"]
    inputs: int = dim("hidden")
    width: int = dim("intermediate")
    activation: GatedActivation = "silu"
    bias: bool = False


Block = (
    Embedding
    | LearnedPositions
    | SinusoidalPositions
    | RMSNorm
    | LayerNorm
    | Linear
    | Head
    | ActivationBlock
    | Attention
    | MLP
    | GatedMLP
)

# Modules that look rows up, by token or position; all others take hidden vectors.
LOOKUPS = (Embedding, LearnedPositions, SinusoidalPositions)

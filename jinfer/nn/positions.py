"""Position embeddings: RoPE and its scaling (YaRN, LongRoPE, NTK), ALiBi, T5 bias, tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec.attention_blocks import TemperatureSpec
from jinfer.modelspec.position_blocks import (
    AlibiSpec,
    LearnedPositionsSpec,
    RelativeBiasSpec,
    RopeScalingSpec,
    RopeSpec,
    SinusoidalPositionsSpec,
)
from jinfer.nn.parameter import parameter
from jinfer.ops.reductions import rounded
from jinfer.ops.rope import rotate

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class CosSin(NamedTuple):
    """RoPE angles: cosine and sine for each pair."""

    cos: Float[Array, "batch tokens pairs"]
    sin: Float[Array, "batch tokens pairs"]


class Rotary(nnx.Module):
    """RoPE: rotary position embedding (arXiv 2104.09864)."""

    def __init__(self, block: RopeSpec, dtype: DTypeLike) -> None:
        self.block, self.has_factors = block, block.factors
        if block.factors:
            self.factors = parameter((block.dim // 2,), ("head_dim",), jnp.float32)

    def __call__(
        self, x: Float[Array, "batch tokens width"], cos_sin: CosSin, size: int
    ) -> Float[Array, "batch tokens width"]:
        """Rotates the first `dim` dimensions of each head by the token's position."""
        return rotate(x, *cos_sin, size=size, adjacent=self.block.pairs == "adjacent")

    def cos_sin(
        self,
        positions: Int[Array, "batch tokens"] | Int[Array, "3 batch tokens"],
        totals: Int[Array, "batch tokens"],
    ) -> CosSin:
        """Computes the angles at these positions.

        Args:
            positions: of three, each pair turns by that of its section (M-RoPE).
            totals: length of each token's sequence; "dynamic" scaling depends on it.
        """
        frequencies, magnitude = rope_frequencies(self.block)
        inverse = jnp.asarray(frequencies, jnp.float32)
        if self.block.factors:
            inverse = inverse / self.factors[...]
        inverse = inverse[None, None]
        if self.block.scaling is not None and self.block.scaling.rope_type == "dynamic":
            inverse = inverse * dynamic_factors(self.block.dim, self.block.scaling, totals)
        if positions.ndim == 3:
            of_pairs = jnp.moveaxis(positions[_sections_of_pairs(self.block)], 0, -1)
            angles = of_pairs.astype(jnp.float32) * inverse
        else:
            angles = positions.astype(jnp.float32)[:, :, None] * inverse
        if self.block.backward:
            angles = -angles
        angles = rounded(angles)
        return CosSin(jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude)


def _sections_of_pairs(block: RopeSpec) -> Int[np.ndarray, " pairs"]:
    """Returns which of the three positions each pair turns by; 0 without sections."""
    pairs = np.arange(block.dim // 2)
    if not block.has_grid or block.sections is None:
        return np.zeros_like(pairs)
    if not block.interleaved:
        return np.repeat(np.arange(3), block.sections)
    return np.where(pairs < 3 * np.array(block.sections)[pairs % 3], pairs % 3, 0)


def rope_frequencies(block: RopeSpec) -> tuple[Float[np.ndarray, " pairs"], float]:
    """Returns radians per position of each pair, and the factor on cos and sin.

    Without "dynamic" scaling: see `dynamic_factors`.
    """
    frequencies = block.theta ** (-np.arange(0, block.dim, 2, dtype=np.float64) / block.dim)
    scaling = block.scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if scaling.rope_type == "yarn":
        return _yarn(frequencies, block, scaling)
    if scaling.rope_type == "longrope":
        return _longrope(frequencies, scaling)
    if scaling.rope_type == "proportional":
        turning = int(scaling.partial_rotary_factor * block.dim // 2)
        return np.where(np.arange(len(frequencies)) < turning, frequencies, 0) / scaling.factor, 1.0
    return frequencies, 1.0


def _llama3(frequencies: np.ndarray, scaling: RopeScalingSpec) -> np.ndarray:
    """Stretches long wavelengths, keeps short ones, and blends those between (Llama 3)."""
    rotations = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((rotations - scaling.low_freq_factor) / span, 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(
    frequencies: np.ndarray, block: RopeSpec, scaling: RopeScalingSpec
) -> tuple[np.ndarray, float]:
    """YaRN: NTK-by-parts interpolation and attention temperature (arXiv 2309.00071)."""

    def pair_that_turns(times: float) -> float:
        trained = scaling.original_max_position_embeddings
        return block.dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(block.theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, block.dim - 1)
    ramp = (np.arange(block.dim // 2) - low) / max(high - low, 0.001)
    stretched = np.clip(ramp, 0.0, 1.0)
    scaled = frequencies * (1 - stretched) + frequencies / scaling.factor * stretched
    return scaled, _yarn_magnitude(scaling)


def _yarn_magnitude(scaling: RopeScalingSpec) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def _longrope(frequencies: np.ndarray, scaling: RopeScalingSpec) -> tuple[np.ndarray, float]:
    """LongRoPE: a factor per pair, different ones beyond the trained length (arXiv 2402.13753)."""
    trained = scaling.original_max_position_embeddings
    longer = scaling.length is not None and scaling.length > trained
    factors = scaling.long_factor if longer else scaling.short_factor
    if scaling.attention_factor is not None:
        magnitude = scaling.attention_factor
    else:
        stretch = math.log(scaling.factor) / math.log(trained) if scaling.factor > 1 else 0.0
        magnitude = math.sqrt(1 + stretch)
    return frequencies / np.asarray(factors if factors is not None else 1.0), magnitude


def dynamic_factors(
    dim: int, scaling: RopeScalingSpec, totals: Int[Array, "batch tokens"]
) -> Float[Array, "batch tokens pairs"]:
    """Frequency factors of dynamic NTK scaling, where theta grows with the sequence length.

    With L tokens and T trained ones, theta becomes theta * g^(dim / (dim - 2)) with g = factor * L
    / T - (factor - 1), so the frequency of pair j changes by g^(-2j / (dim - 2)).
    """
    trained = scaling.original_max_position_embeddings
    more = jnp.maximum(totals - trained, 0).astype(jnp.float32)
    exponents = -np.arange(0, dim, 2) / max(dim - 2, 1)
    growth = 1 + scaling.factor * more / trained
    return growth[..., None] ** jnp.asarray(exponents, jnp.float32)[None, None]


def alibi_slopes(heads: int, block: AlibiSpec) -> Float[np.ndarray, " heads"]:
    """ALiBi slope of each head (arXiv 2108.12409)."""

    def series(count: int) -> np.ndarray:
        return block.factor * 2.0 ** (-block.max_bias * np.arange(1, count + 1) / count)

    power = 2 ** math.floor(math.log2(heads))
    if power == heads:
        return series(heads)
    return np.concatenate([series(power), series(2 * power)[0::2][: heads - power]])


def scaled_queries(
    q: Float[Array, "batch tokens width"],
    rule: TemperatureSpec | None,
    positions: Int[Array, "batch tokens"],
) -> Float[Array, "batch tokens width"]:
    """Scales queries by the factor of their positions; None: unchanged."""
    if rule is None:
        return q
    places = positions + rule.offset
    if rule.power is not None:
        factors = jnp.exp(rule.power * jnp.log1p(places.astype(jnp.float32) / rule.span))
    else:
        steps = (places // rule.span).astype(jnp.float32)
        factors = 1.0 + rule.beta * jnp.log1p(steps)
    return (q.astype(jnp.float32) * factors[..., None]).astype(q.dtype)


class RelativeBias(nnx.Module):
    """T5 relative position bias: learned, per head and distance bucket (arXiv 1910.10683).

    Half of the buckets are for exact distances, half for logarithmic ranges up to `max_distance`.
    If attention is bidirectional, half of all are for keys after the query.
    """

    def __init__(self, block: RelativeBiasSpec, heads: int) -> None:
        self.block = block
        self.weight = parameter((block.buckets, heads), ("buckets", "heads"), jnp.float32)

    def by_distance(self, causal: bool) -> tuple[int, Float[Array, "heads distances"]]:
        """Returns the lowest distance, and the biases up to the highest; beyond, they repeat."""
        highest = self.block.max_distance
        lowest = 0 if causal else -highest
        distances = jnp.arange(lowest, highest + 1, dtype=jnp.int32)
        return lowest, self.weight[...][self._bucket(distances, causal)].T

    def _bucket(self, distance: Array, causal: bool) -> Array:
        count = self.block.buckets if causal else self.block.buckets // 2
        offset = jnp.zeros_like(distance) if causal else jnp.where(distance < 0, count, 0)
        back = jnp.maximum(distance, 0) if causal else jnp.abs(distance)
        exact = count // 2
        # Logarithms in float32, as the reference: a distance at the edge of a range is rounded.
        log = jnp.log(jnp.maximum(back, 1).astype(jnp.float32) / exact)
        ranges = (log / math.log(self.block.max_distance / exact) * (count - exact)).astype(
            jnp.int32
        )
        far = jnp.minimum(exact + ranges, count - 1)
        return offset + jnp.where(back < exact, back, far)


class PositionTable(nnx.Module):
    """Learned absolute position embeddings."""

    def __init__(self, block: LearnedPositionsSpec, dtype: DTypeLike) -> None:
        self.block = block
        rows = block.size + block.offset
        self.weight = parameter((rows, block.width), ("positions", "hidden"), dtype)

    def __call__(
        self, positions: Int[Array, "batch tokens"]
    ) -> Float[Array, "batch tokens hidden"]:
        """Looks up rows of the table."""
        return self.weight[...][positions + self.block.offset]


class Sinusoids(nnx.Module):
    """Sinusoidal position embeddings (arXiv 1706.03762), sines then cosines."""

    def __init__(self, block: SinusoidalPositionsSpec, dtype: DTypeLike) -> None:
        self.block, self.dtype = block, dtype

    def __call__(
        self, positions: Int[Array, "batch tokens"]
    ) -> Float[Array, "batch tokens hidden"]:
        """[sin(p f_0), sin(p f_1), ..., cos(p f_0), cos(p f_1), ...]."""
        inverse = jnp.asarray(_sinusoid_frequencies(self.block), jnp.float32)
        at = (positions + self.block.offset).astype(jnp.float32)
        angles = rounded(at[:, :, None] * inverse[None, None, :])
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(self.dtype)


def sinusoids(
    block: SinusoidalPositionsSpec, positions: Int[np.ndarray, " rows"]
) -> Float[np.ndarray, "rows hidden"]:
    """Computes `Sinusoids` at these positions, in float64."""
    angles = np.outer(positions + block.offset, _sinusoid_frequencies(block))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def _sinusoid_frequencies(block: SinusoidalPositionsSpec) -> Float[np.ndarray, " pairs"]:
    half = block.width // 2
    steps = half if block.frequencies == "standard" else half - 1
    return 10000.0 ** (-np.arange(half) / steps)

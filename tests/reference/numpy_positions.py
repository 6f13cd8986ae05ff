"""Ways to tell positions: rotary embeddings and their scalings, ALiBi slopes, sinusoids."""

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

type Floats = NDArray[np.float64]
type Pairs = Literal["halves", "adjacent"]


def rope_frequencies(dim: int, theta: float = 10000.0) -> Floats:
    """[dim / 2] angles a position (Su et al., 2021)."""
    return theta ** (-np.arange(0, dim, 2) / dim)


def rope(
    x: Floats,
    positions: ArrayLike,
    theta: float = 10000.0,
    pairs: Pairs = "halves",
    rotary_dim: int | None = None,
    inv_freq: Floats | None = None,
    attention_factor: float = 1.0,
) -> Floats:
    """Rotate the first `rotary_dim` of x [length, heads, dim], two numbers at a time.

    "adjacent" takes (0, 1), (2, 3), ...; "halves" (0, rotary_dim / 2), (1, rotary_dim / 2 + 1), ...
    `inv_freq` replaces the frequencies that theta gives; the factor is what YaRN multiplies by.
    """
    dim = x.shape[-1] if rotary_dim is None else rotary_dim
    frequencies = rope_frequencies(dim, theta) if inv_freq is None else inv_freq
    angles = np.asarray(positions, np.float64)[:, None, None] * frequencies
    turn = attention_factor * np.exp(1j * angles)
    if pairs == "adjacent":
        first, second = x[..., 0:dim:2], x[..., 1:dim:2]
    else:
        first, second = x[..., : dim // 2], x[..., dim // 2 : dim]
    turned = (first + 1j * second) * turn
    axis = -1 if pairs == "adjacent" else -2
    rotated = np.stack([turned.real, turned.imag], axis).reshape(*x.shape[:-1], dim)
    return np.concatenate([rotated, x[..., dim:]], axis=-1)


def linear_frequencies(frequencies: Floats, factor: float) -> Floats:
    """Position interpolation (Chen et al., 2023): positions are divided by the factor."""
    return frequencies / factor


def llama3_frequencies(
    frequencies: Floats, factor: float, low: float, high: float, original_context: int
) -> Floats:
    """Llama 3.1: waves short against the original context stay, long ones are interpolated.

    `low` and `high` are the numbers of waves in the original context between which the two are
    blended.
    """
    waves = original_context * frequencies / (2 * math.pi)
    kept = np.clip((waves - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def yarn_frequencies(
    dim: int,
    theta: float,
    factor: float,
    original_context: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Floats:
    """YaRN (Peng et al., 2023): as Llama 3.1, but blended linearly over the index of the pair.

    The ramp runs between the pairs that turn `beta_fast` and `beta_slow` times in the original
    context; `truncate` rounds its ends outwards to whole pairs.
    """

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - np.clip((np.arange(dim // 2) - low) / width, 0, 1)
    return rope_frequencies(dim, theta) * (kept + (1 - kept) / factor)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies queries and keys by: 0.1 ln(factor) + 1, and 1 without extension."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """LongRoPE (Ding et al., 2024) as Phi-3 has it: sqrt(1 + ln(factor) / ln(original context))."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_context))


def dynamic_ntk_theta(theta: float, dim: int, factor: float, length: int, original: int) -> float:
    """The theta of dynamic NTK scaling for a sequence of a length above the original context."""
    return theta * (factor * length / original - (factor - 1)) ** (dim / (dim - 2))


def alibi_slopes_floor(heads: int) -> Floats:
    """ALiBi (Press et al., 2021) as its authors, BLOOM and Baichuan fill odd numbers of heads.

    The slopes of the next lower power of two, then every other slope of the next higher one.
    """
    lower = 2 ** math.floor(math.log2(heads))
    slopes = 2.0 ** (-8 / lower * np.arange(1, lower + 1))
    between = 2.0 ** (-4 / lower * np.arange(1, 2 * (heads - lower), 2))
    return np.concatenate([slopes, between])


def alibi_slopes_ceil(heads: int, bias_max: float = 8.0) -> Floats:
    """ALiBi as MPT fills odd numbers of heads.

    The slopes of the next higher power of two, every second one first, then the others.
    """
    higher = 2 ** math.ceil(math.log2(heads))
    slopes = 2.0 ** (-bias_max / higher * np.arange(1, higher + 1))
    if higher == heads:
        return slopes
    return np.concatenate([slopes[1::2], slopes[::2]])[:heads]


def _sines_then_cosines(positions: ArrayLike, frequencies: Floats) -> Floats:
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def sinusoids_fairseq(positions: ArrayLike, hidden: int) -> Floats:
    """[length, hidden] as fairseq and M2M-100 have them: the last frequency is 1/10000 itself."""
    half = hidden // 2
    return _sines_then_cosines(positions, 10000.0 ** (-np.arange(half) / (half - 1)))


def sinusoids_marian(positions: ArrayLike, hidden: int) -> Floats:
    """[length, hidden] with the frequencies of Vaswani et al. (2017), in Marian's order.

    Marian puts all sines before all cosines, where the paper alternates them.
    """
    return _sines_then_cosines(positions, 10000.0 ** (-np.arange(0, hidden, 2) / hidden))

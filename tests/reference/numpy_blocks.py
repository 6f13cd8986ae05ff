"""Norms, activations, projections and attention."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

type Floats = NDArray[np.float64]


def linear(x: Floats, weight: ArrayLike, bias: ArrayLike | None = None) -> Floats:
    """x [..., in] times weight [out, in], plus bias [out]."""
    y = x @ np.asarray(weight, np.float64).T
    return y if bias is None else y + np.asarray(bias, np.float64)


def rms_norm(x: Floats, weight: ArrayLike, eps: float) -> Floats:
    """Root mean square norm of the last axis (Zhang and Sennrich, 2019)."""
    return (
        x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * np.asarray(weight, np.float64)
    )


def layer_norm(
    x: Floats, weight: ArrayLike = 1.0, bias: ArrayLike = 0.0, eps: float = 1e-5
) -> Floats:
    """Norm of the last axis to mean 0 and variance 1 (Ba et al., 2016)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.mean(centred * centred, axis=-1, keepdims=True)
    normed = centred / np.sqrt(variance + eps)
    return normed * np.asarray(weight, np.float64) + np.asarray(bias, np.float64)


def softmax(x: Floats) -> Floats:
    """Softmax of the last axis; -inf gives 0."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), written so that no x overflows."""
    return 0.5 * (1 + np.tanh(x / 2))


def softplus(x: Floats) -> Floats:
    """log(1 + exp(x)), written so that no x overflows."""
    return np.logaddexp(0, x)


def tanh(x: Floats) -> Floats:
    """Hyperbolic tangent."""
    return np.tanh(x)


def silu(x: Floats) -> Floats:
    """x sigmoid(x), also called swish."""
    return x * sigmoid(x)


def gelu_erf(x: Floats) -> Floats:
    """x times the normal distribution function (Hendrycks and Gimpel, 2016)."""
    return x * 0.5 * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))


def gelu_tanh(x: Floats) -> Floats:
    """The same paper's approximation by tanh, that GPT-2 uses."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_quick(x: Floats) -> Floats:
    """The same paper's approximation by a sigmoid."""
    return x * sigmoid(1.702 * x)


def relu(x: Floats) -> Floats:
    """Positive part."""
    return np.maximum(x, 0)


def relu_squared(x: Floats) -> Floats:
    """Square of the positive part (So et al., 2021)."""
    return np.square(np.maximum(x, 0))


def swiglu_clamped(gate: Floats, up: Floats, limit: float = 7.0, alpha: float = 1.702) -> Floats:
    """The gated unit of gpt-oss: gate cut above, up on both sides and shifted by 1."""
    gate = np.minimum(gate, limit)
    return (np.clip(up, -limit, limit) + 1) * gate * sigmoid(alpha * gate)


def mask(
    queries: int, keys: int, causal: bool = True, window: int | None = None
) -> NDArray[np.bool]:
    """[queries, keys]: what the last `queries` of `keys` positions see.

    A window counts the position itself: with a window of 1 it sees nothing else.
    """
    distance = np.arange(keys - queries, keys)[:, None] - np.arange(keys)[None, :]
    seen = np.ones((queries, keys), np.bool)
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= np.abs(distance) < window
    return seen


def attention(
    q: Floats,
    k: Floats,
    v: Floats,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    slopes: ArrayLike | None = None,
) -> Floats:
    """q [queries, heads, dim], k and v [keys, kv_heads, dim] -> [queries, heads, dim].

    Consecutive query heads share a kv head. The scale is 1 / sqrt(dim) where none is given.
    `slopes` [heads] are ALiBi's: a key at distance n loses n slopes.
    """
    queries, heads, dim = q.shape
    keys, kv_heads, _ = k.shape
    k, v = (np.repeat(each, heads // kv_heads, axis=1) for each in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * (dim**-0.5 if scale is None else scale)
    if slopes is not None:
        distance = np.arange(keys - queries, keys)[:, None] - np.arange(keys)[None, :]
        scores = scores - np.asarray(slopes, np.float64)[:, None, None] * np.abs(distance)
    scores = np.where(mask(queries, keys, causal, window), scores, -np.inf)
    return np.einsum("hqk,khd->qhd", softmax(scores), v)


def chosen_keys(q: Floats, weights: Floats, keys: Floats, top_k: int) -> np.ndarray:
    """The positions that an indexer chooses: queries [heads, dim], keys [keys, dim] of the past.

    index score = sum over heads of weight * relu(q . k) (arXiv 2512.02556, equation 1)
    """
    scores = weights @ np.maximum(q @ keys.T, 0.0)
    order = sorted(range(len(keys)), key=lambda s: (-scores[s], s))
    return np.array(sorted(order[:top_k]))

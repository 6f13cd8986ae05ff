"""RMSNorm, LayerNorm and softmax of rows of vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax

from jinfer.cpu import rowwise as cpu
from jinfer.ops.backend import has_cpu_calls

if TYPE_CHECKING:
    from jaxtyping import Float


def normalize(
    x: Float[Array, "*rows size"],
    weight: Float[Array, "*groups size"] | None,
    bias: Float[Array, "*groups size"] | None = None,
    *,
    eps: float,
    centered: bool = False,
    offset: float = 0.0,
) -> Float[Array, "*rows size"]:
    """Computes RMSNorm or LayerNorm in float32.

    (x - mean) / sqrt(mean((x - mean)^2) + eps) * (weight + offset) + bias

    Args:
        weight, bias: broadcast over the last axes of x; None: 1 and 0.
        centered: LayerNorm (arXiv 1607.06450); otherwise RMSNorm, with mean = 0 (arXiv 1910.07467).
    """
    y = x.astype(jnp.float32)
    if has_cpu_calls():
        size = x.shape[-1]
        w, b = (None if v is None else v.astype(y.dtype).reshape(-1, size) for v in (weight, bias))
        y = cpu.norm(y.reshape(-1, size), w, b, centered=centered, eps=eps, offset=offset)
        return y.reshape(x.shape).astype(x.dtype)
    if centered:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    if weight is not None:
        y = y * _as_row(weight.astype(jnp.float32) + offset, y)
    if bias is not None:
        y = y + _as_row(bias.astype(jnp.float32), y)
    return y.astype(x.dtype)


def softmax(x: Float[Array, "rows size"]) -> Float[Array, "rows size"]:
    """Computes a row-wise softmax in float32."""
    if has_cpu_calls():
        return cpu.softmax(x.astype(jnp.float32))
    return jax.nn.softmax(x.astype(jnp.float32), axis=-1)


def _as_row(vector: Array, like: Array) -> Array:
    return vector.reshape((1,) * (like.ndim - vector.ndim) + vector.shape)


def normalize_l2(
    x: Float[Array, "*rows size"], weight: Float[Array, "*groups size"] | None, *, eps: float
) -> Float[Array, "*rows size"]:
    """Computes x / sqrt(sum(x^2) + eps) * weight, an RMSNorm over sqrt(size), in float32."""
    size = x.shape[-1]
    y = normalize(x.astype(jnp.float32), weight, eps=eps / size)
    return (y * size**-0.5).astype(x.dtype)

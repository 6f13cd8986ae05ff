"""Normalization of vectors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jinfer.cpu import norm as cpu


def rms_norm(
    x: Float[Array, "*rows size"], weight: Float[Array, " size"], eps: float, offset: float = 0.0
) -> Float[Array, "*rows size"]:
    """x / sqrt(mean(x^2) + eps) * (weight + offset), computed in float32 (arXiv 1910.07467)."""
    if jax.default_backend() == "cpu" and cpu.available():
        y = cpu.rms_norm(x.astype(jnp.float32), weight.astype(jnp.float32), eps, offset)
        return y.astype(x.dtype)
    return rms_norm_reference(x, weight, eps, offset)


def rms_norm_reference(
    x: Float[Array, "*rows size"], weight: Float[Array, " size"], eps: float, offset: float = 0.0
) -> Float[Array, "*rows size"]:
    """The same in XLA's operations."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    factors = weight.astype(jnp.float32) + offset
    return (y * factors.reshape((1,) * (y.ndim - 1) + factors.shape)).astype(x.dtype)

"""Normalization modules: RMSNorm, LayerNorm and the norms of queries and keys (QK norm)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec import attention_blocks, blocks
from jinfer.nn.parameter import parameter
from jinfer.ops.norm import normalize, normalize_l2

if TYPE_CHECKING:
    from jaxtyping import Float


class RMSNorm(nnx.Module):
    """RMSNorm (arXiv 1910.07467), computed in float32."""

    def __init__(self, block: blocks.RMSNormSpec, dtype: DTypeLike) -> None:
        self.block = block
        if block.weight:
            size = block.size // block.groups if block.shared else block.size
            self.weight = parameter((size,), ("hidden",), jnp.float32)

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        """x / sqrt(mean(x^2) + eps) * weight, in each group."""
        block = self.block
        weight = self.weight[...] if block.weight else None
        offset = 1.0 if block.plus_one else 0.0
        if block.groups == 1:
            return normalize(x, weight, eps=block.eps, offset=offset)
        if weight is not None and not block.shared:
            weight = weight.reshape(block.groups, -1)
        grouped = x.reshape(*x.shape[:-1], block.groups, -1)
        return normalize(grouped, weight, eps=block.eps, offset=offset).reshape(x.shape)


class L2Norm(nnx.Module):
    """L2 norm, computed in float32."""

    def __init__(self, block: blocks.L2NormSpec, dtype: DTypeLike) -> None:
        self.eps = block.eps

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        """x / sqrt(sum(x^2) + eps)."""
        return normalize_l2(x, None, eps=self.eps)


class Scale(nnx.Module):
    """Multiplication by learned numbers (LayerScale), in float32."""

    def __init__(self, block: blocks.ScaleSpec, dtype: DTypeLike) -> None:
        self.block = block
        self.weight = parameter((block.size,), ("hidden",), jnp.float32)

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Multiplies each dimension by its number."""
        factors = self.weight[...] + (1.0 if self.block.plus_one else 0.0)
        parts = x.astype(jnp.float32).reshape(-1, self.block.size, x.shape[-1] // self.block.size)
        return (parts * factors[None, :, None]).reshape(x.shape).astype(x.dtype)


class Bias(nnx.Module):
    """Addition of a learned vector, in float32."""

    def __init__(self, block: blocks.BiasSpec, dtype: DTypeLike) -> None:
        self.bias = parameter((block.size,), ("hidden",), jnp.float32)

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        """x + bias."""
        bias = self.bias[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (x.astype(jnp.float32) + bias).astype(x.dtype)


class LayerNorm(nnx.Module):
    """LayerNorm (arXiv 1607.06450), computed in float32."""

    def __init__(self, block: blocks.LayerNormSpec, dtype: DTypeLike) -> None:
        self.block = block
        if block.weight:
            self.weight = parameter((block.size,), ("hidden",), jnp.float32)
        if block.bias:
            self.bias = parameter((block.size,), ("hidden",), jnp.float32)

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        """(x - mean) / sqrt(variance + eps) * weight + bias, in each group."""
        block = self.block
        weight = self.weight[...] if block.weight else None
        bias = self.bias[...] if block.bias else None
        offset = 1.0 if block.plus_one else 0.0
        if block.groups == 1:
            return normalize(x, weight, bias, eps=block.eps, centered=True, offset=offset)
        weight, bias = (v if v is None else v.reshape(block.groups, -1) for v in (weight, bias))
        grouped = x.reshape(*x.shape[:-1], block.groups, -1)
        y = normalize(grouped, weight, bias, eps=block.eps, centered=True, offset=offset)
        return y.reshape(x.shape)


class HeadNorm(nnx.Module):
    """QK norm: of queries, keys or attention's output, per head or over all heads."""

    def __init__(
        self, block: attention_blocks.HeadNormSpec, heads: int, head_dim: int, axis: str
    ) -> None:
        self.block = block
        shapes = {"head": (head_dim,), "heads": (heads, head_dim), "width": (heads * head_dim,)}
        axes = {"head": ("head_dim",), "heads": (axis, "head_dim"), "width": (axis,)}
        if block.weight:
            self.weight = parameter(shapes[block.over], axes[block.over], jnp.float32)
        if block.bias:
            self.bias = parameter(shapes[block.over], axes[block.over], jnp.float32)

    def __call__(
        self, x: Float[Array, "batch tokens heads head_dim"]
    ) -> Float[Array, "batch tokens heads head_dim"]:
        """Normalizes the heads."""
        y = x.reshape(*x.shape[:2], 1, -1) if self.block.over == "width" else x
        weight = self.weight[...] if self.block.weight else None
        if self.block.kind == "l2":
            return normalize_l2(y, weight, eps=self.block.eps).reshape(x.shape)
        y = normalize(
            y,
            weight,
            self.bias[...] if self.block.bias else None,
            eps=self.block.eps,
            centered=self.block.kind == "layer",
            offset=1.0 if self.block.plus_one else 0.0,
        )
        return y.reshape(x.shape)

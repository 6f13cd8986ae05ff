"""Pooling: one vector for a whole text (CLS, last token, mean), and the classification head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec import blocks
from jinfer.nn.parameter import parameter
from jinfer.ops.matmul.matmul import linear

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Pool(nnx.Module):
    """Pools each text to its first, last or mean vector."""

    def __init__(self, block: blocks.PoolSpec, dtype: DTypeLike) -> None:
        self.block = block

    def __call__(
        self, x: Float[Array, "batch tokens hidden"], lengths: Int[Array, " batch"]
    ) -> Float[Array, "batch hidden"]:
        """Pools the tokens that are not padding."""
        if self.block.take == "first":
            return x[:, 0]
        if self.block.take == "last":
            return jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
        counts = jnp.arange(x.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
        total = jnp.sum(jnp.where(counts[..., None], x.astype(jnp.float32), 0.0), axis=1)
        return (total / lengths[:, None].astype(jnp.float32)).astype(x.dtype)


class Select(nnx.Module):
    """Selects some numbers of each vector."""

    def __init__(self, block: blocks.SelectSpec, dtype: DTypeLike) -> None:
        self.block = block

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows indices"]:
        """x[..., indices]."""
        return jnp.take(x, jnp.asarray(self.block.indices, jnp.int32), axis=-1, mode="clip")


class Classifier(nnx.Module):
    """Classification head: one score per class, computed in float32."""

    def __init__(self, block: blocks.ClassifierSpec, dtype: DTypeLike) -> None:
        shape, axes = (block.outputs, block.inputs), ("classes", "hidden")
        self.weight = parameter(shape, axes, jnp.float32)
        self.bias = parameter(shape[:1], axes[:1], jnp.float32) if block.bias else None

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows classes"]:
        """x @ weight.T + bias: raw scores (logits)."""
        bias = None if self.bias is None else self.bias[...]
        return linear(x.astype(jnp.float32), self.weight[...], bias)

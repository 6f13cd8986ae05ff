"""Mixture of attention heads (MoA): queries and output projections of each token's experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec import attention_blocks
from jinfer.nn.activation_taps import tapped
from jinfer.nn.attention_modules import Attention
from jinfer.nn.forward_context import AttentionCache, ForwardBatch, split_heads
from jinfer.nn.parameter import parameter
from jinfer.nn.projections import project
from jinfer.nn.router import Router
from jinfer.ops import moe

if TYPE_CHECKING:
    from jaxtyping import Float


class StackedProjection(nnx.Module):
    """A projection of every expert, weight [experts, outputs, inputs]; one bias for all of them."""

    def __init__(
        self, shape: tuple[int, int, int], axes: tuple[str, str], bias: bool, dtype: DTypeLike
    ) -> None:
        self.weight = parameter(shape, ("experts", *axes), dtype, role="matrix")
        self.bias = parameter(shape[1:2], ("hidden",), dtype) if bias else None

    def projection(self) -> moe.ExpertProjection:
        """The operation's operands, without the bias."""
        return moe.ExpertProjection(self.weight[...], None)


class ExpertAttention(Attention):
    """Attention whose query heads are those of the experts that a router chooses for each token."""

    block: attention_blocks.ExpertAttentionSpec
    q: Any
    o: Any

    def __init__(self, block: attention_blocks.ExpertAttentionSpec, dtype: DTypeLike) -> None:
        super().__init__(block, dtype)
        inner, width = block.kv_heads * block.head_dim, block.kv_heads * block.value_width
        self.router = Router(block.routing)
        shapes = (block.experts, inner, block.inputs), (block.experts, block.outputs, width)
        self.q = StackedProjection(shapes[0], ("heads", "hidden"), False, dtype)
        self.o = StackedProjection(shapes[1], ("hidden", "heads"), block.has_bias("o"), dtype)

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        batch: ForwardBatch,
        cache: AttentionCache | None,
    ) -> tuple[Float[Array, "batch tokens hidden"], AttentionCache | None]:
        """The block's output, and the cache with the new tokens' keys and values."""
        block, rows = self.block, x.reshape(-1, x.shape[-1])
        chosen, weights = self.router(rows)
        q = moe.project_chosen(rows, chosen, self.q.projection())
        # A key head is read by consecutive query heads: one of each chosen expert.
        q = q.reshape(*x.shape[:2], block.top_k, block.kv_heads, -1).swapaxes(2, 3)
        k, v = project(x, (self.k, self.v))
        k_norm = None if block.qk_norm is None else self.k_norm
        q = self._queries(q.reshape(*x.shape[:2], -1), batch)
        k = self._rotated(k, block.kv_heads, k_norm, batch)
        q = split_heads(q, block.heads)
        k, v = split_heads(k, block.kv_heads), split_heads(v, block.kv_heads)
        out, cache = self._attended(x, q, k, v, batch, cache)
        out = tapped("heads", out)
        by_key = out.reshape(len(rows), block.kv_heads, block.top_k, -1).swapaxes(1, 2)
        pairs = by_key.reshape(len(rows) * block.top_k, -1)
        y = moe.project_chosen(pairs, chosen.reshape(-1, 1), self.o.projection())
        y = y.reshape(len(rows), block.top_k, -1).astype(jnp.float32)
        y = moe.sum_chosen(y * weights[..., None]).astype(x.dtype)
        return (y if self.o.bias is None else y + self.o.bias[...][None]).reshape(x.shape), cache

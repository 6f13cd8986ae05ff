"""Indexer of sparse attention (DeepSeek-V3.2's lightning indexer): scores keys for each query."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec import attention_blocks, blocks
from jinfer.nn.forward_context import ForwardBatch, split_heads
from jinfer.nn.norm_modules import LayerNorm
from jinfer.nn.positions import Rotary
from jinfer.nn.projections import Linear
from jinfer.ops.attention.sparse import IndexQuery

if TYPE_CHECKING:
    from jaxtyping import Float


class Indexer(nnx.Module):
    """Indexer of sparse attention (arXiv 2512.02556); every device has all of its heads."""

    def __init__(
        self, block: attention_blocks.IndexerSpec, inputs: int, query_inputs: int, dtype: DTypeLike
    ) -> None:
        self.block = block
        heads, width = block.heads, block.heads * block.head_dim
        self.q = Linear(query_inputs, width, False, dtype, ("index", "latent"))
        self.k = Linear(inputs, block.head_dim, False, dtype, ("index", "hidden"))
        norm = blocks.LayerNormSpec(kind="layer", size=block.head_dim, eps=block.eps)
        self.k_norm = LayerNorm(norm, jnp.float32)
        # So few numbers decide so much that they are never quantized.
        axes = ("index", "hidden")
        self.head_weights = Linear(inputs, heads, False, jnp.float32, axes, role="plain")
        if block.position is not None:
            self.rope = Rotary(block.position, dtype)

    def __call__(
        self,
        x: Float[Array, "1 tokens hidden"],
        latent: Float[Array, "1 tokens latent"],
        batch: ForwardBatch,
    ) -> IndexQuery:
        """Queries, keys and weights of a flat batch.

        Args:
            x: the attention's input.
            latent: what queries are projected from.
        """
        q = self._rotated(self.q(latent), batch)
        k = self._rotated(self.k_norm(self.k(x)), batch)
        weights = self.head_weights(x.astype(jnp.float32))[0]
        return IndexQuery(
            split_heads(q, self.block.heads)[0], k[0][:, None], weights, self.block.top_k
        )

    def _rotated(self, x: Array, batch: ForwardBatch) -> Array:
        if self.block.position is None:
            return x
        if self.block.rotated == "last":  # an equal order of both changes no score
            heads = x.reshape(*x.shape[:-1], -1, self.block.head_dim)
            x = jnp.roll(heads, self.block.position.dim, axis=-1).reshape(x.shape)
        return self.rope(x, batch.cos_sin_of(self.rope), self.block.head_dim)

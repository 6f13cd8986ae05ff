"""Multi-head latent attention (MLA): all heads share one small latent vector per token.

The cache holds the latent and the rotated part of the key. The up-projections of the latent to keys
and values are absorbed into the query and the output instead, so that nothing is expanded over the
length of the context (arXiv 2405.04434, section 2.1).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec import attention_blocks, blocks
from jinfer.nn.activation_taps import is_tapped, observed, tapped
from jinfer.nn.attention_features import GatedHeads, Indexer
from jinfer.nn.attention_taps import tap_cached_pattern
from jinfer.nn.forward_context import AttentionCache, ForwardBatch, split_heads
from jinfer.nn.norm_modules import RMSNorm
from jinfer.nn.parameter import parameter
from jinfer.nn.positions import Rotary, scaled_queries
from jinfer.nn.projections import Linear
from jinfer.ops.attention.mask_rules import ScoreRules
from jinfer.ops.matmul.dense import matmul_per_head

if TYPE_CHECKING:
    from jaxtyping import Float


class LatentAttention(GatedHeads):
    """Multi-head latent attention (MLA)."""

    def __init__(self, block: attention_blocks.LatentAttentionSpec, dtype: DTypeLike) -> None:
        self.block = block
        q_width = block.heads * (block.nope_dim + block.rope_dim)
        if block.query_rank is None:
            self.q = Linear(block.inputs, q_width, False, dtype, ("heads", "hidden"))
        else:
            rank = block.query_rank
            self.q_a = Linear(block.inputs, rank, block.bias, dtype, ("latent", "hidden"))
            self.q_a_norm = _norm(rank, block.eps)
            self.q_b = Linear(rank, q_width, False, dtype, ("heads", "latent"))
        latent = block.latent_rank + block.rope_dim
        self.kv_a = Linear(block.inputs, latent, block.bias, dtype, ("latent", "hidden"))
        self.kv_a_norm = _norm(block.latent_rank, block.eps)
        # Absorbed into other matrices, so they are never quantized.
        if block.split:
            self.k_b = _UpProjection(block, block.nope_dim, dtype)
            self.v_b = _UpProjection(block, block.value_dim, dtype)
        else:
            unfolded = block.heads * (block.nope_dim + block.value_dim)
            axes = ("heads", "latent")
            self.kv_b = Linear(block.latent_rank, unfolded, False, dtype, axes, role="plain")
        o_width = block.heads * block.value_dim
        self.o = Linear(o_width, block.inputs, block.bias, dtype, ("hidden", "heads"))
        if block.position is not None:
            self.rope = Rotary(block.position, dtype)
        if block.gate is not None:
            self.build_gate(block.gate, block.inputs, block.heads, o_width, dtype)
        if block.sinks:
            self.sinks = parameter((block.heads,), ("heads",), jnp.float32)
        if block.own_indexer is not None:
            queried = block.query_rank or block.inputs
            self.indexer = Indexer(block.own_indexer, block.inputs, queried, dtype)

    def __call__(
        self, x: Float[Array, "batch tokens hidden"], batch: ForwardBatch, cache: AttentionCache
    ) -> tuple[Float[Array, "batch tokens hidden"], AttentionCache]:
        """Computes the block's output, and the cache with the new tokens' latents."""
        block = self.block
        (k_b, to_key), (v_b, to_value) = self._unfolding()
        latent = x if block.query_rank is None else self.q_a_norm(self.q_a(x))
        q = (self.q if block.query_rank is None else self.q_b)(latent)
        q = split_heads(scaled_queries(q, block.temperature, batch.positions), block.heads)
        index = None if block.own_indexer is None else self.indexer(x, latent, batch)
        nope, rotated = q[..., : block.nope_dim], q[..., block.nope_dim :]
        in_latent = matmul_per_head(nope[0], k_b, to_key, transposed=True).astype(x.dtype)[None]
        rotated = self._rotated(rotated.reshape(*x.shape[:2], -1), batch).reshape(rotated.shape)
        if is_tapped("q"):
            whole = tapped("q", jnp.concatenate([nope, rotated], axis=-1))
            nope, rotated = whole[..., : block.nope_dim], whole[..., block.nope_dim :]
            in_latent = matmul_per_head(nope[0], k_b, to_key, transposed=True)
            in_latent = in_latent.astype(x.dtype)[None]
        q = jnp.concatenate([in_latent, rotated], axis=-1)
        kv = self.kv_a(x)
        latent = self.kv_a_norm(kv[..., : block.latent_rank])
        latent = latent if block.latent_scale == 1 else latent * block.latent_scale
        shared = tapped("latent", latent)[:, :, None]
        shared_key = self._rotated(kv[..., block.latent_rank :], batch)[:, :, None]
        observed("k", lambda: self._expanded(shared, k_b, to_key, shared_key))
        observed("v", lambda: self._expanded(shared, v_b, to_value))
        keys = jnp.concatenate([shared, shared_key], axis=-1)
        rules = self._rules()
        out, cache = batch.extend(q[0], keys[0], None, cache, None, rules, index)
        out = tap_cached_pattern(out, q[0], cache, batch, rules)
        out = matmul_per_head(out[..., : block.latent_rank], v_b, to_value)
        if block.gate is not None:
            out = self.gated(block.gate, out[None], x)[0]
        if is_tapped("heads"):
            out = tapped("heads", out[None])[0]
        return self.o(out.astype(x.dtype).reshape(*x.shape[:2], -1)), cache

    def _expanded(self, latent: Array, matrices: Array, rows: slice, *extra_parts: Array) -> Array:
        """Computes keys or values of each head, for taps and derivatives.

        Args:
            extra_parts: further parts of each head: the rotated part of keys.
        """
        each = jnp.broadcast_to(latent[0], (latent.shape[1], self.block.heads, latent.shape[3]))
        own = matmul_per_head(each, matrices, rows).astype(latent.dtype)[None]
        wide = [jnp.broadcast_to(one, (*own.shape[:3], one.shape[3])) for one in extra_parts]
        return jnp.concatenate([own, *wide], axis=-1)

    def _rotated(self, x: Array, batch: ForwardBatch) -> Array:
        if self.block.position is None:
            return x
        return self.rope(x, batch.cos_sin_of(self.rope), self.block.rope_dim)

    def _unfolding(self) -> tuple[tuple[Array, slice], tuple[Array, slice]]:
        """Returns the up-projections of the latent to keys and to values, as matrices per head.

        [heads, rows, latent_rank] each, with the slice of rows to use.
        """
        block = self.block
        if block.split:
            whole = slice(None)
            return (self.k_b.weight[...], whole), (self.v_b.weight[...], whole)
        rows = block.nope_dim + block.value_dim
        both = self.kv_b.weight[...].reshape(block.heads, rows, block.latent_rank)
        return (both, slice(block.nope_dim)), (both, slice(block.nope_dim, None))

    def _rules(self) -> ScoreRules:
        """YaRN's temperature is applied to the scores a second time, as in DeepSeek-V2's code."""
        scale = self.block.scale or 1 / math.sqrt(self.block.nope_dim + self.block.rope_dim)
        scaling = None if self.block.position is None else self.block.position.scaling
        if scaling is not None and scaling.mscale_all_dim and scaling.factor > 1:
            scale *= (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2
        return ScoreRules(scale, sinks=self.sinks[...] if self.block.sinks else None)


class _UpProjection(nnx.Module):
    """Returns an up-projection matrix per head."""

    def __init__(
        self, block: attention_blocks.LatentAttentionSpec, rows: int, dtype: DTypeLike
    ) -> None:
        shape = (block.heads, rows, block.latent_rank)
        self.weight = parameter(shape, ("heads", "rows", "latent"), dtype)


def _norm(size: int, eps: float) -> RMSNorm:
    return RMSNorm(blocks.RMSNormSpec(kind="rms", size=size, eps=eps), jnp.float32)

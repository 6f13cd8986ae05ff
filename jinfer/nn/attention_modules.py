"""Attention modules (MHA, GQA, MQA): causal over a KV cache, bidirectional, and cross-attention."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.modelspec import attention_blocks, position_blocks
from jinfer.nn.activation_taps import tapped
from jinfer.nn.attention_features import (
    DifferentialHeads,
    DisentangledBias,
    GatedHeads,
    Indexer,
    paired_values,
)
from jinfer.nn.attention_taps import tap_cached_pattern, tap_text_pattern
from jinfer.nn.feed_forward import Router
from jinfer.nn.forward_context import AttentionCache, ForwardBatch, split_heads
from jinfer.nn.image_modules import GridRotary, GridWindows
from jinfer.nn.norm_modules import HeadNorm
from jinfer.nn.parameter import parameter
from jinfer.nn.positions import RelativeBias, Rotary, alibi_slopes, scaled_queries
from jinfer.nn.projections import Linear, LowRankLinear, project
from jinfer.nn.tensor_parallel import ShardedAlibi, local_alibi_slopes
from jinfer.ops import moe
from jinfer.ops.attention.hadamard import rotate_keys, rotate_queries
from jinfer.ops.attention.kv_cache import ENCODER, AttentionMetadata, LayerCache, write_cache
from jinfer.ops.attention.mask_rules import BiasFunction, ScoreRules
from jinfer.ops.attention.paged_attention import attend, attend_text

if TYPE_CHECKING:
    from jaxtyping import Float


class Attention(GatedHeads):
    """Attention with shared key and value heads (MHA, GQA, MQA)."""

    def __init__(self, block: attention_blocks.AttentionSpec, dtype: DTypeLike) -> None:
        self.block = block
        q_width, kv_width = block.heads * block.head_dim, block.kv_heads * block.head_dim
        v_width, o_width = block.kv_heads * block.value_width, block.heads * block.value_width
        build = partial(Linear, dtype=dtype, bounded=block.bounded)
        self.q = build(block.inputs, q_width, block.has_bias("q"), axes=("heads", "hidden"))
        if block.kv_layer is None:
            axes = ("kv_heads", "hidden")
            self.k = build(block.inputs, kv_width, block.has_bias("k"), axes=axes)
            if not block.tied_values:
                self.v = build(block.inputs, v_width, block.has_bias("v"), axes=axes)
        if block.low_rank is not None:
            self._build_low_rank(block.low_rank, dtype)
        self.o = build(o_width, block.outputs, block.has_bias("o"), axes=("hidden", "heads"))
        if block.qk_norm is not None:
            self.q_norm = HeadNorm(block.qk_norm, block.heads, block.head_dim, "heads")
            if block.kv_layer is None:
                self.k_norm = HeadNorm(block.qk_norm, block.kv_heads, block.head_dim, "kv_heads")
        if block.v_norm is not None:
            self.v_norm = HeadNorm(block.v_norm, block.kv_heads, block.value_width, "kv_heads")
        if isinstance(block.position, position_blocks.RopeSpec):
            self.rope = Rotary(block.position, dtype)
        if isinstance(block.position, position_blocks.GridRopeSpec):
            self.rope = GridRotary(block.position)
        if isinstance(block.position, position_blocks.RelativeBiasSpec):
            self.relative = RelativeBias(block.position, block.heads)
        if isinstance(block.position, position_blocks.DisentangledSpec):
            self.distances = DisentangledBias(block.position, block.inputs, q_width, dtype)
        if block.out_norm is not None:
            self.out_norm = HeadNorm(block.out_norm, block.heads, block.value_width, "heads")
        if block.gate is not None:
            self.build_gate(block.gate, block.inputs, block.heads, o_width, dtype)
        if block.differential is not None:
            self.differential = DifferentialHeads(block.differential, block.head_dim)
        if block.own_indexer is not None:
            self.indexer = Indexer(block.own_indexer, block.inputs, block.inputs, dtype)
        if block.sinks:
            self.sinks = parameter((block.heads,), ("heads",), jnp.float32)

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        batch: ForwardBatch,
        cache: AttentionCache | None,
    ) -> tuple[Float[Array, "batch tokens hidden"], AttentionCache | None]:
        """Computes the block's output, and the cache with the new tokens' keys and values.

        Without a cache the batch is whole texts, with bidirectional attention. An attention to
        another layer's keys reads that layer's cache, which has the new tokens.
        """
        if self.block.kv_layer is not None:
            (q,) = self._products(x, "q")
            q = tapped("q", split_heads(self._queries(q, batch), self.block.heads))
            rules = self._rules(q, q, batch.positions, causal=True)
            assert isinstance(cache, LayerCache), "its layers are on one device"
            flat = batch.attend(q[0], cache, rules.window, rules)
            flat = tap_cached_pattern(flat, q[0], cache, batch, rules)
            heads = tapped("heads", self._gated(flat[None], x))
            return self.o(heads.reshape(*x.shape[:2], -1)), cache
        out, cache = self._attended(x, *self._project(x, batch), batch, cache)
        heads = tapped("heads", self._gated(out, x))
        return self.o(heads.reshape(*x.shape[:2], -1)), cache

    def _attended(
        self,
        x: Array,
        q: Array,
        k: Array,
        v: Array,
        batch: ForwardBatch,
        cache: AttentionCache | None,
    ) -> tuple[Array, AttentionCache | None]:
        """Computes the heads' outputs [batch, tokens, heads, value_dim], and the new cache."""
        q, k, v = tapped("q", q), tapped("k", k), tapped("v", v)
        rules = self._rules(q, k, batch.positions, causal=cache is not None)
        if cache is None:
            assert batch.lengths is not None, "whole texts need lengths"
            if self.block.grid_window is not None:
                assert batch.grid is not None, "only patches are on a grid"
                windows = GridWindows.of(batch.grid, self.block.grid_window)
                q, k, v = windows.split(q), windows.split(k), windows.split(v)
                return windows.join(attend_text(q, k, v, windows.lengths, rules)), None
            out = attend_text(q, k, v, batch.lengths, rules)
            return tap_text_pattern(out, q, k, v, batch.lengths, rules), None
        index = None if self.block.own_indexer is None else self.indexer(x, x, batch)
        flat, cache = batch.extend(q[0], k[0], v[0], cache, rules.window, rules, index)
        return tap_cached_pattern(flat, q[0], cache, batch, rules)[None], cache

    def _gated(self, out: Array, x: Array) -> Array:
        """Prepares the heads' outputs [batch, tokens, heads, value_dim] for `o`."""
        if self.block.differential is not None:
            out = self.differential(out)
        if self.block.out_norm is not None:
            out = self.out_norm(out)
        return out if self.block.gate is None else self.gated(self.block.gate, out, x)

    def _build_low_rank(self, rank: int, dtype: DTypeLike) -> None:
        """Adds the two low-rank matrices of each existing projection."""
        for name in "qkv":
            if (low_rank := getattr(self, name, None)) is not None:
                outputs, inputs = low_rank.weight.shape
                axes = "kv_heads" if name in "kv" else "heads"
                setattr(self, f"{name}_low", LowRankLinear(inputs, rank, outputs, axes, dtype))

    def _products(self, x: Array, names: str) -> tuple[Array, ...]:
        """Projects x by the named projections, with their low-rank terms."""
        products = project(x, [getattr(self, name) for name in names])
        if self.block.low_rank is None:
            return products
        low_rank: list[LowRankLinear] = [getattr(self, f"{name}_low") for name in names]
        narrow = project(x, [each.down for each in low_rank])
        return tuple(
            product + each.up(low)
            for product, each, low in zip(products, low_rank, narrow, strict=True)
        )

    def _project(self, x: Array, batch: ForwardBatch) -> tuple[Array, Array, Array]:
        block = self.block
        if block.tied_values:
            q, k = self._products(x, "qk")
            v = k
        else:
            q, k, v = self._products(x, "qkv")
        if block.clip is not None:
            v = jnp.clip(v, -block.clip, block.clip)
        k_norm = None if block.qk_norm is None else self.k_norm
        q, k = self._queries(q, batch), self._rotated(k, block.kv_heads, k_norm, batch)
        q, k = split_heads(q, block.heads), split_heads(k, block.kv_heads)
        v = split_heads(v, block.kv_heads)
        if block.v_norm is not None:
            v = self.v_norm(v)
        return q, k, v if block.differential is None else paired_values(v)

    def _queries(self, q: Array, batch: ForwardBatch) -> Array:
        q_norm = None if self.block.qk_norm is None else self.q_norm
        q = self._rotated(q, self.block.heads, q_norm, batch)
        return scaled_queries(q, self.block.temperature, batch.positions)

    def _rotated(
        self, part: Array, heads: int, norm: HeadNorm | None, batch: ForwardBatch
    ) -> Array:
        """Clips, normalizes and rotates queries or keys, as rows of all heads."""
        block = self.block
        if block.clip is not None:
            part = jnp.clip(part, -block.clip, block.clip)
        if norm is not None and block.qk_norm is not None and not block.qk_norm.rotated:
            part = norm(split_heads(part, heads)).reshape(part.shape)
        if isinstance(block.position, position_blocks.RopeSpec | position_blocks.GridRopeSpec):
            part = self.rope(part, batch.cos_sin_of(self.rope), block.head_dim)
        if norm is not None and block.qk_norm is not None and block.qk_norm.rotated:
            part = norm(split_heads(part, heads)).reshape(part.shape)
        return part

    def _rules(self, q: Array, k: Array, positions: Array, causal: bool) -> ScoreRules:
        block = self.block
        scale = block.scale if block.scale is not None else 1 / math.sqrt(block.head_dim)
        rules = ScoreRules(
            scale=scale,
            softcap=block.softcap,
            window=block.window or block.chunk,
            chunked=block.chunk is not None,
            ahead=None if causal else 1 if block.causal else block.window,
            sinks=self.sinks[...] if block.sinks else None,
            slopes=self._slopes(),
        )
        match block.position:
            case position_blocks.DisentangledSpec():
                return rules._replace(bias=self._disentangled(q, k, positions, scale))
            case position_blocks.RelativeBiasSpec():
                lowest, table = self.relative.by_distance(causal)
                return rules._replace(by_distance=table, lowest=lowest)
            case position_blocks.AlibiSpec() if not causal and rules.slopes is not None:
                # Distances are symmetric.
                far = abs(jnp.arange(1 - q.shape[1], q.shape[1], dtype=jnp.float32))
                table = -rules.slopes[:, None] * far[None]
                return rules._replace(slopes=None, by_distance=table, lowest=1 - q.shape[1])
        return rules

    def _disentangled(self, q: Array, k: Array, positions: Array, scale: float) -> BiasFunction:
        """Returns the score bias from the projected distance vectors."""
        vectors = self.distances.vectors()[None]
        if self.distances.block.projections == "own":
            at_q, at_k = self.distances.q(vectors), self.distances.k(vectors)
        else:
            at_q, at_k = self._products(vectors, "qk")
        to_q, to_k = split_heads(at_q, self.block.heads), split_heads(at_k, k.shape[2])
        return self.distances.bias(q, k, to_q[0], to_k[0], positions, scale)

    def _slopes(self) -> Array | None:
        if isinstance(self.block.position, ShardedAlibi):
            return local_alibi_slopes(self.block.position)
        if not isinstance(self.block.position, position_blocks.AlibiSpec):
            return None
        return jnp.asarray(alibi_slopes(self.block.heads, self.block.position), jnp.float32)


class CrossAttention(nnx.Module):
    """Cross-attention: over an encoder's output, whose keys and values are computed once."""

    def __init__(self, block: attention_blocks.CrossAttentionSpec, dtype: DTypeLike) -> None:
        self.block = block
        width, kv_width = block.heads * block.head_dim, block.keys * block.head_dim
        axes = ("heads" if block.kv_heads is None else "kv_heads", "hidden")
        self.q = Linear(block.inputs, width, block.has_bias("q"), dtype, ("heads", "hidden"))
        self.k = Linear(block.encoded, kv_width, block.has_bias("k"), dtype, axes)
        self.v = Linear(block.encoded, kv_width, block.has_bias("v"), dtype, axes)
        self.o = Linear(width, block.inputs, block.has_bias("o"), dtype, ("hidden", "heads"))

    def fill(
        self, encoded: Float[Array, "1 length hidden"], cache: LayerCache, at: AttentionMetadata
    ) -> LayerCache:
        """Writes the keys and values of an encoder's output to the cache."""
        k, v = (split_heads(y, self.block.keys) for y in project(encoded, (self.k, self.v)))
        return write_cache(cache, rotate_keys(k[0], cache.keys), v[0], at)

    def __call__(
        self, x: Float[Array, "batch tokens hidden"], batch: ForwardBatch, cache: LayerCache
    ) -> tuple[Float[Array, "batch tokens hidden"], LayerCache]:
        """Computes the block's output; the cache is unchanged."""
        block = self.block
        rules = ScoreRules(
            block.scale if block.scale is not None else 1 / math.sqrt(block.head_dim),
            block.softcap,
        )
        q = tapped("q", split_heads(self.q(x), block.heads))[0]
        at, rotated = batch.attention_metadata(ENCODER), rotate_queries(q, cache.keys)
        out = attend(rotated, cache.keys, cache.values, at, batch.encoded_last(), rules)
        out = tap_cached_pattern(out, q, cache, batch, rules, encoded=True)
        heads = tapped("heads", out.reshape(*x.shape[:2], *out.shape[1:]))
        return self.o(heads.reshape(*x.shape[:2], -1)), cache


class StackedProjection(nnx.Module):
    """A projection of every expert, weight [experts, outputs, inputs]; one bias for all of them."""

    def __init__(
        self, shape: tuple[int, int, int], axes: tuple[str, str], bias: bool, dtype: DTypeLike
    ) -> None:
        self.weight = parameter(shape, ("experts", *axes), dtype, role="matrix")
        self.bias = parameter(shape[1:2], ("hidden",), dtype) if bias else None

    def projection(self) -> moe.ExpertProjection:
        """Returns the operation's operands, without the bias."""
        return moe.ExpertProjection(self.weight[...], None)


class ExpertAttention(Attention):
    """Attention with the query heads of the experts that a router chooses for each token (MoA)."""

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
        """Computes the block's output, and the cache with the new tokens' keys and values."""
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

"""Attention: over a cache of what came before, over a whole text, over an encoder's output."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jinfer.nn.disentangled import DisentangledBias
from jinfer.nn.linear import Linear, project
from jinfer.nn.norm import HeadNorm
from jinfer.nn.parameter import parameter
from jinfer.nn.position import CosSin, RelativeBias, Rotary, alibi_slopes
from jinfer.ops.attention import attend, extend
from jinfer.ops.cache import LayerCache, write
from jinfer.ops.score_rules import Bias, ScoreRules
from jinfer.spec import blocks


class Step(NamedTuple):
    """Where the tokens of one forward pass stand.

    Attributes:
        positions: of each token in its sequence.
        slot: the first row of the cache that the batch uses.
        lengths: tokens of each row that count, where rows are whole texts.
        encoded: tokens of the encoder's output that each row may see, where there is one.
        total: tokens of each sequence when all that is known of it has been computed; where it is
            not given, as when a token is chosen, the last one here is the last.
        cos_sin: of rotary embeddings, where it is known already, by `str` of their block.
    """

    positions: Int[Array, "batch tokens"]
    slot: Int[Array, ""]
    lengths: Int[Array, " batch"] | None = None
    encoded: Int[Array, " batch"] | None = None
    total: Int[Array, " batch"] | None = None
    cos_sin: dict[str, CosSin] | None = None

    @property
    def totals(self) -> Int[Array, " batch"]:
        """Tokens of each sequence."""
        given = self.lengths if self.total is None else self.total
        return self.positions[:, -1] + 1 if given is None else given

    def cos_sin_of(self, rope: Rotary) -> CosSin:
        """What the tokens are rotated by."""
        known = (self.cos_sin or {}).get(str(rope.block))
        return rope.cos_sin(self.positions, self.totals) if known is None else known

    def with_cos_sin(self, ropes: Iterable[Rotary]) -> Step:
        """The same, with what these rotate by computed once for all layers."""
        cos_sin = {
            str(rope.block): rope.cos_sin(self.positions, self.totals)
            for rope in {str(each.block): each for each in ropes if not each.block.factors}.values()
        }
        # Without the barrier XLA computes the sines anew in each layer.
        return self._replace(cos_sin=lax.optimization_barrier(cos_sin))


class Attention(nnx.Module):
    """Attention with shared key and value heads (MHA, GQA, MQA)."""

    def __init__(self, block: blocks.Attention, dtype: DTypeLike) -> None:
        self.block = block
        q_width, kv_width = block.heads * block.head_dim, block.kv_heads * block.head_dim
        self.q = Linear(block.inputs, q_width, block.has_bias("q"), dtype, ("heads", "hidden"))
        self.k = Linear(block.inputs, kv_width, block.has_bias("k"), dtype, ("kv_heads", "hidden"))
        self.v = Linear(block.inputs, kv_width, block.has_bias("v"), dtype, ("kv_heads", "hidden"))
        self.o = Linear(q_width, block.inputs, block.has_bias("o"), dtype, ("hidden", "heads"))
        if block.qk_norm is not None:
            self.q_norm = HeadNorm(block.qk_norm, block.heads, block.head_dim, "heads")
            self.k_norm = HeadNorm(block.qk_norm, block.kv_heads, block.head_dim, "kv_heads")
        if isinstance(block.position, blocks.Rope):
            self.rope = Rotary(block.position, dtype)
        if isinstance(block.position, blocks.Relative):
            self.relative = RelativeBias(block.position, block.heads)
        if isinstance(block.position, blocks.Disentangled):
            self.distances = DisentangledBias(block.position, block.inputs, dtype)
        if block.sinks:
            self.sinks = parameter((block.heads,), ("heads",), jnp.float32)

    def __call__(
        self, x: Float[Array, "batch tokens hidden"], step: Step, cache: LayerCache | None
    ) -> tuple[Float[Array, "batch tokens hidden"], LayerCache | None]:
        """The block's output, and the cache with the new tokens' keys and values in it.

        Without a cache the batch is whole texts, in which every token sees every other.
        """
        q, k, v = self._project(x, step)
        rules = self._rules(q, k, step.positions, causal=cache is not None)
        if cache is None:
            assert step.lengths is not None, "whole texts need lengths"
            k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
            last = jnp.broadcast_to(step.lengths[:, None] - 1, step.positions.shape)
            out = attend(q, k, v, step.positions, last, jnp.int32(0), rules)
        else:
            out, cache = extend(q, k, v, cache, step.positions, step.slot, rules)
        return self.o(out.reshape(*x.shape[:2], -1)), cache

    def _project(self, x: Array, step: Step) -> tuple[Array, Array, Array]:
        block = self.block
        q, k, v = project(x, (self.q, self.k, self.v))
        if block.clip is not None:
            q, k, v = (jnp.clip(part, -block.clip, block.clip) for part in (q, k, v))
        q, k, v = (
            split(part, heads)
            for part, heads in ((q, block.heads), (k, block.kv_heads), (v, block.kv_heads))
        )
        if block.qk_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if isinstance(block.position, blocks.Rope):
            cos_sin = step.cos_sin_of(self.rope)
            q, k = self.rope(q, cos_sin), self.rope(k, cos_sin)
        return q, k, v

    def _rules(self, q: Array, k: Array, positions: Array, causal: bool) -> ScoreRules:
        block = self.block
        scale = block.scale if block.scale is not None else 1 / math.sqrt(block.head_dim)
        if isinstance(block.position, blocks.Disentangled):
            bias: Bias | None = self._disentangled(q, k, positions, scale)
        else:
            bias = self._bias(causal)
        return ScoreRules(
            scale=scale,
            softcap=block.softcap,
            bias=bias,
            window=block.window,
            ahead=None if causal else block.window,
            sinks=self.sinks[...] if block.sinks else None,
            slopes=self._slopes(),
        )

    def _disentangled(self, q: Array, k: Array, positions: Array, scale: float) -> Bias:
        """The bias, from the projections of the distances' vectors."""
        vectors = self.distances.vectors()[None]
        to_q, to_k = split(self.q(vectors), self.block.heads), split(self.k(vectors), k.shape[2])
        return self.distances.bias(q, k, to_q[0], to_k[0], positions, scale)

    def _slopes(self) -> Array | None:
        if not isinstance(self.block.position, blocks.Alibi):
            return None
        return jnp.asarray(alibi_slopes(self.block.heads, self.block.position), jnp.float32)

    def _bias(self, causal: bool) -> Bias | None:
        if isinstance(self.block.position, blocks.Relative):
            return self.relative.bias(causal)
        return None


class CrossAttention(nnx.Module):
    """Attention over an encoder's output, whose keys and values are computed once."""

    def __init__(self, block: blocks.CrossAttention, dtype: DTypeLike) -> None:
        self.block = block
        width = block.heads * block.head_dim
        self.q = Linear(block.inputs, width, block.has_bias("q"), dtype, ("heads", "hidden"))
        self.k = Linear(block.encoded, width, block.has_bias("k"), dtype, ("heads", "hidden"))
        self.v = Linear(block.encoded, width, block.has_bias("v"), dtype, ("heads", "hidden"))
        self.o = Linear(width, block.inputs, block.has_bias("o"), dtype, ("hidden", "heads"))

    def fill(
        self, encoded: Float[Array, "batch length hidden"], cache: LayerCache, slot: Int[Array, ""]
    ) -> LayerCache:
        """The cache with the keys and values of an encoder's output in rows slot.. of it."""
        k, v = (split(y, self.block.heads) for y in project(encoded, (self.k, self.v)))
        return write(cache, k, v, jnp.zeros(encoded.shape[0], jnp.int32), slot)

    def __call__(
        self, x: Float[Array, "batch tokens hidden"], step: Step, cache: LayerCache
    ) -> tuple[Float[Array, "batch tokens hidden"], LayerCache]:
        """The block's output, and the cache as it was."""
        assert step.encoded is not None, "cross-attention needs an encoder's output"
        block = self.block
        rules = ScoreRules(
            block.scale if block.scale is not None else 1 / math.sqrt(block.head_dim)
        )
        last = jnp.broadcast_to(step.encoded[:, None] - 1, step.positions.shape)
        q = split(self.q(x), block.heads)
        out = attend(q, cache.keys, cache.values, step.positions, last, step.slot, rules)
        return self.o(out.reshape(*x.shape[:2], -1)), cache


def split(x: Float[Array, "batch tokens width"], heads: int) -> Any:
    """[batch, tokens, heads, width / heads]."""
    return x.reshape(*x.shape[:2], heads, -1)

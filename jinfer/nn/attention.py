"""Self-attention over a cache."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jinfer.cache import LayerCache, write
from jinfer.nn.linear import Linear
from jinfer.nn.position import Rotary, alibi_slopes
from jinfer.ops.attention import attend
from jinfer.spec import blocks


class Step(NamedTuple):
    """Where the tokens of one forward pass stand.

    Attributes:
        positions: of each token in its sequence.
        slot: the first row of the cache that the batch uses.
    """

    positions: Int[Array, "batch tokens"]
    slot: Int[Array, ""]


class Attention(nnx.Module):
    """Attention with shared key and value heads (MHA, GQA, MQA)."""

    def __init__(self, block: blocks.Attention, dtype: DTypeLike) -> None:
        self.block = block
        q_width, kv_width = block.heads * block.head_dim, block.kv_heads * block.head_dim
        self.q = Linear(block.inputs, q_width, block.has_bias("q"), dtype, ("heads", "hidden"))
        self.k = Linear(block.inputs, kv_width, block.has_bias("k"), dtype, ("kv_heads", "hidden"))
        self.v = Linear(block.inputs, kv_width, block.has_bias("v"), dtype, ("kv_heads", "hidden"))
        self.o = Linear(q_width, block.inputs, block.has_bias("o"), dtype, ("hidden", "heads"))
        if isinstance(block.position, blocks.Rope):
            self.rope = Rotary(block.position, dtype)

    def __call__(
        self, x: Float[Array, "batch tokens hidden"], step: Step, cache: LayerCache
    ) -> tuple[Float[Array, "batch tokens hidden"], LayerCache]:
        """The block's output, and the cache with the new tokens' keys and values in it."""
        block = self.block
        q = _split(self.q(x), block.heads)
        k = _split(self.k(x), block.kv_heads)
        v = _split(self.v(x), block.kv_heads)
        slopes = None
        if isinstance(block.position, blocks.Rope):
            q, k = self.rope(q, step.positions), self.rope(k, step.positions)
        elif isinstance(block.position, blocks.Alibi):
            slopes = jnp.asarray(alibi_slopes(block.heads, block.position), jnp.float32)
        cache = write(cache, k, v, step.positions[:, 0], step.slot)
        scale = block.scale if block.scale is not None else 1 / math.sqrt(block.head_dim)
        out = attend(
            q,
            cache.keys,
            cache.values,
            step.positions,
            step.slot,
            scale=scale,
            window=block.window,
            slopes=slopes,
        )
        return self.o(out.reshape(*x.shape[:2], -1)), cache


def _split(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:2], heads, -1)

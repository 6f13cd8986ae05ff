"""Disentangled attention (DeBERTa, arXiv 2006.03654): content-to-position score bias."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jinfer.matmul_precision import matmul_precision
from jinfer.modelspec import blocks, position_blocks
from jinfer.nn.norm_modules import LayerNorm
from jinfer.nn.parameter import parameter
from jinfer.ops.attention.mask_rules import Bias

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class DisentangledBias(nnx.Module):
    """The relative position embeddings and the score biases computed from them."""

    def __init__(
        self, block: position_blocks.DisentangledSpec, width: int, dtype: DTypeLike
    ) -> None:
        self.block = block
        self.weight = parameter((2 * block.buckets, width), ("positions", "hidden"), dtype)
        self.norm = LayerNorm(blocks.LayerNormSpec(kind="layer", size=width, eps=block.eps), dtype)

    def vectors(self) -> Float[Array, "rows hidden"]:
        """The normalized distance vectors."""
        return self.norm(self.weight[...])

    def bias(
        self,
        q: Float[Array, "batch tokens heads head_dim"],
        k: Float[Array, "batch tokens kv_heads head_dim"],
        to_q: Float[Array, "rows heads head_dim"],
        to_k: Float[Array, "rows kv_heads head_dim"],
        positions: Int[Array, "batch tokens"],
        scale: float,
    ) -> Bias:
        """The function from distances to biases: content to position and position to content.

        Args:
            q, k: of whole texts, which begin at position 0.
            to_q, to_k: the distance vectors, projected like queries and keys.
            scale: of the scores.
        """
        k, to_k = (jnp.repeat(part, q.shape[2] // k.shape[2], axis=-2) for part in (k, to_k))
        by_query = _products(q, to_k) * scale
        by_key = _products(k, to_q) * scale
        table = jnp.asarray(distance_buckets(self.block))
        farthest = self.block.max_distance

        def bias(distance: Int[Array, "batch tokens keys"]) -> Array:
            rows = table[jnp.clip(distance, -farthest, farthest) + farthest]
            keys = positions[:, :, None] - distance
            content = jnp.take_along_axis(by_query, rows[:, None], axis=-1)
            return content + jax.vmap(lambda one, key, row: one[:, key, row])(by_key, keys, rows)

        return bias


def _products(x: Array, vectors: Array) -> Float[Array, "batch heads tokens rows"]:
    product = partial(jnp.einsum, "bthd,rhd->bhtr", precision=matmul_precision(x))
    return product(x, vectors, preferred_element_type=jnp.float32)


def distance_buckets(block: position_blocks.DisentangledSpec) -> Int[np.ndarray, " distances"]:
    """The embedding row of each distance from -max_distance to max_distance (log buckets).

    Distances up to half of the buckets have rows of their own, farther ones share logarithmic
    ranges. In float32, as the reference: a distance at the edge of a range is rounded.
    """
    half = np.float32(block.buckets // 2)
    far = np.arange(1, block.max_distance + 1).astype(np.float32)
    width = np.log(np.float32((block.max_distance - 1) / half))
    ranges = np.ceil(np.log(far / half) / width * (half - 1)) + half
    near = np.where(far <= half, far, ranges).astype(np.int32)
    both = np.concatenate([-near[::-1], np.zeros(1, np.int32), near])
    return np.clip(both + block.buckets, 0, 2 * block.buckets - 1)

"""Optional parts of attention: output gate, differential heads, disentangled bias, indexer."""

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
from jinfer.modelspec import attention_blocks, blocks, position_blocks
from jinfer.nn.forward_context import ForwardBatch, split_heads
from jinfer.nn.norm_modules import LayerNorm
from jinfer.nn.parameter import parameter
from jinfer.nn.positions import Rotary
from jinfer.nn.projections import Linear
from jinfer.ops.activation import activate
from jinfer.ops.attention.mask_rules import BiasFunction
from jinfer.ops.attention.sparse import IndexQuery
from jinfer.ops.norm import normalize

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class GatedHeads(nnx.Module):
    """Base of attentions with an output gate: parameters `gate` and `gate_bias`."""

    def build_gate(
        self,
        spec: attention_blocks.OutputGateSpec,
        inputs: int,
        heads: int,
        width: int,
        dtype: DTypeLike,
    ) -> None:
        """Args:
        width: of the outputs of all heads.
        """
        outputs = width if spec.per == "element" else heads
        self.gate = Linear(inputs, outputs, spec.bias is True, dtype, ("heads", "hidden"))
        if spec.bias == "head":
            self.gate_bias = parameter((heads,), ("heads",), dtype)

    def gated(
        self,
        spec: attention_blocks.OutputGateSpec,
        out: Float[Array, "batch tokens heads width"],
        x: Float[Array, "batch tokens inputs"],
    ) -> Float[Array, "batch tokens heads width"]:
        """Gates the heads' outputs by a projection of x."""
        gate = split_heads(self.gate(x), out.shape[2])
        if spec.bias == "head":
            gate = gate + self.gate_bias[...][None, None, :, None]
        factors = activate(spec.activation, gate)
        return out * (factors * spec.scale if spec.scale != 1 else factors)


class DifferentialHeads(nnx.Module):
    """The learned factor of the subtracted heads, and the norm of the difference."""

    def __init__(self, block: attention_blocks.DifferentialSpec, head_dim: int) -> None:
        self.block = block
        for name in ("q1", "k1", "q2", "k2"):
            vector = parameter((head_dim,), ("head_dim",), jnp.float32)
            setattr(self, f"lambda_{name}", vector)

    def __call__(
        self, out: Float[Array, "batch tokens heads width"]
    ) -> Float[Array, "batch tokens half width"]:
        """Computes the normalized difference of the halves."""
        q1, k1, q2, k2 = (getattr(self, f"lambda_{name}")[...] for name in ("q1", "k1", "q2", "k2"))
        factor = jnp.exp(jnp.sum(q1 * k1)) - jnp.exp(jnp.sum(q2 * k2)) + self.block.init
        one, two = jnp.split(out.astype(jnp.float32), 2, axis=2)
        y = normalize(one - factor * two, None, eps=self.block.eps)
        return (y * (1 - self.block.init)).astype(out.dtype)


def paired_values(
    v: Float[Array, "batch tokens kv_heads head_dim"],
) -> Float[Array, "batch tokens kv_heads width"]:
    """Concatenates the values of head j of both halves, for head j of each half."""
    both = jnp.concatenate(jnp.split(v, 2, axis=2), axis=-1)
    return jnp.concatenate([both, both], axis=2)


class DisentangledBias(nnx.Module):
    """The relative position embeddings and the score biases computed from them."""

    def __init__(
        self, block: position_blocks.DisentangledSpec, width: int, outputs: int, dtype: DTypeLike
    ) -> None:
        """Args:
        outputs: width of the queries of all heads.
        """
        self.block = block
        self.weight = parameter((2 * block.buckets, width), ("positions", "hidden"), dtype)
        if block.norm:
            norm = blocks.LayerNormSpec(kind="layer", size=width, eps=block.eps)
            self.norm = LayerNorm(norm, dtype)
        if block.projections == "own":
            self.q = Linear(width, outputs, True, dtype, ("heads", "hidden"))
            self.k = Linear(width, outputs, False, dtype, ("heads", "hidden"))

    def vectors(self) -> Float[Array, "rows hidden"]:
        """The distance vectors, normalized unless there is no norm."""
        return self.norm(self.weight[...]) if self.block.norm else self.weight[...]

    def bias(
        self,
        q: Float[Array, "batch tokens heads head_dim"],
        k: Float[Array, "batch tokens kv_heads head_dim"],
        to_q: Float[Array, "rows heads head_dim"],
        to_k: Float[Array, "rows kv_heads head_dim"],
        positions: Int[Array, "batch tokens"],
        scale: float,
    ) -> BiasFunction:
        """Returns a function from distances to biases: content to position, position to content.

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
    """Returns the embedding row of each distance from -max_distance to max_distance (log buckets).

    Distances up to half of the buckets have a row each, larger distances share logarithmic ranges.
    In float32, as the reference: a distance at the edge of a range is rounded.
    """
    if block.exact:
        distances = np.arange(-block.max_distance, block.max_distance + 1, dtype=np.int32)
        return np.clip(distances + block.buckets, 0, 2 * block.buckets - 1)
    half = np.float32(block.buckets // 2)
    far = np.arange(1, block.max_distance + 1).astype(np.float32)
    width = np.log(np.float32((block.max_distance - 1) / half))
    ranges = np.ceil(np.log(far / half) / width * (half - 1)) + half
    near = np.where(far <= half, far, ranges).astype(np.int32)
    both = np.concatenate([-near[::-1], np.zeros(1, np.int32), near])
    return np.clip(both + block.buckets, 0, 2 * block.buckets - 1)


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
        # Never quantized: few weights with a large effect.
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
        """Computes queries, keys and weights of a flat batch.

        Args:
            x: the attention's input.
            latent: input of the query projection.
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
        if self.block.rotated == "last":  # the same order of both changes no score
            heads = x.reshape(*x.shape[:-1], -1, self.block.head_dim)
            x = jnp.roll(heads, self.block.position.dim, axis=-1).reshape(x.shape)
        return self.rope(x, batch.cos_sin_of(self.rope), self.block.head_dim)

"""The cache of keys and values: plain or quantized arrays, state in and state out."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from jinfer.quant.format import QuantFormat
from jinfer.quant.kind import Kind
from jinfer.quant.vectors import QuantizedVectors, quantize_vectors, zeros

# [slots, kv_heads, length, head_dim], whole or as codes of each vector.
type Rows = Array | QuantizedVectors


class LayerCache(NamedTuple):
    """Keys and values of one attention; position p of a sequence is at index p.

    The length is inside the heads: attention then reads each head's keys in one run, 4 to 15
    times faster on XLA:CPU than [slots, length, kv_heads, head_dim].
    """

    keys: Rows
    values: Rows


Cache = dict[str, LayerCache]


class CacheShape(NamedTuple):
    """What one attention keeps of each token.

    Attributes:
        heads: key and value heads.
        key_dim, value_dim: of each head; 0 where nothing is kept.
        of: the stack whose tokens these are: a decoder keeps its own and, for cross-attention,
            what it needs of the encoder's.
    """

    heads: int
    key_dim: int
    value_dim: int
    of: Literal["decoder", "encoder"] = "decoder"


def write(
    cache: LayerCache,
    keys: Float[Array, "batch tokens kv_heads head_dim"],
    values: Float[Array, "batch tokens kv_heads head_dim"],
    start: Int[Array, " batch"],
    slot: Int[Array, ""],
) -> LayerCache:
    """Puts new tokens into rows slot.. of the cache, from position `start` of each row on.

    start + tokens must not exceed the cache's length: XLA would move the write to fit.
    """

    def into(old: Array, rows: Array) -> Array:
        zero = jnp.int32(0)
        for b in range(rows.shape[0]):
            at = (slot + b, zero, start[b], zero)
            old = lax.dynamic_update_slice(old, rows[b : b + 1], at)
        return old

    kept = LayerCache(_as_kept(keys, cache.keys), _as_kept(values, cache.values))
    # Without the barrier XLA:CPU fuses the update into its readers too, and copies the cache.
    return lax.optimization_barrier(jax.tree.map(into, cache, kept))


def _as_kept(new: Array, old: Rows) -> Rows:
    """New tokens as the cache keeps them: [batch, kv_heads, tokens, head_dim]."""
    rows = new.transpose(0, 2, 1, 3)
    if isinstance(old, QuantizedVectors):
        return quantize_vectors(rows, old.format)
    if old.dtype == jnp.float16 and rows.dtype != jnp.float16:
        limit = float(jnp.finfo(jnp.float16).max)
        rows = jnp.clip(rows.astype(jnp.float32), -limit, limit)
    return rows.astype(old.dtype)


def empty(
    shapes: dict[str, CacheShape], slots: int, length: int, encoded: int, kind: Kind
) -> Cache:
    """A cache of zeros.

    Args:
        shapes: attention's name -> what it keeps.
        length, encoded: tokens of the decoder and of the encoder that a slot has room for.
        kind: a type of numbers, or how they are quantized.
    """
    lengths = {"decoder": length, "encoder": encoded}

    def rows(shape: CacheShape, width: int) -> Rows:
        whole = (slots, shape.heads, lengths[shape.of], width)
        return zeros(whole, kind) if isinstance(kind, QuantFormat) else jnp.zeros(whole, kind)

    return {
        name: LayerCache(rows(shape, shape.key_dim), rows(shape, shape.value_dim))
        for name, shape in shapes.items()
    }


def nbytes(cache: Cache) -> int:
    """Bytes a cache takes."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(cache))

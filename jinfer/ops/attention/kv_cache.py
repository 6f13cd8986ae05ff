"""The paged cache of keys and values: pools of blocks, plain or quantized, state in and state out.

A sequence's tokens stand in blocks of `BLOCK`, anywhere in the pool; a table says in which. Several
sequences may have blocks in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jinfer.cpu import empty_arrays
from jinfer.modelspec.cache_dtype import Kind
from jinfer.modelspec.quant_format import QuantFormat
from jinfer.quant import kv_vectors
from jinfer.quant.kv_vectors import QuantizedVectors, quantize_vectors
from jinfer.xla import trees
from jinfer.xla.abstract import Abstract
from jinfer.xla.device import platform

if TYPE_CHECKING:
    from jaxtyping import Float, Int

BLOCK = 64  # tokens

# [blocks, kv_heads, BLOCK, head_dim], whole or as codes of each vector.
type Rows = Array | QuantizedVectors


class LayerCache(NamedTuple):
    """Keys and values of one attention.

    A block's tokens are inside the heads: attention then reads each head's keys in runs, 4 to 15
    times faster on XLA:CPU than [blocks, BLOCK, kv_heads, head_dim].
    """

    keys: Rows
    values: Rows


Cache = dict[str, LayerCache]


class Placement(NamedTuple):
    """Where the tokens of a flat batch stand.

    Tokens of one sequence stand next to each other, in rising positions.

    Attributes:
        rows: each token's row of `tables`; -1: padding, which is neither written nor read.
        positions: of each token in its sequence, from 0 on.
        tables: row by row the blocks of a sequence: entry j is where its positions
            j * BLOCK .. (j + 1) * BLOCK - 1 are. Entries that nobody needs may hold anything.
    """

    rows: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    tables: Int[Array, "rows blocks"]


class CacheShape(NamedTuple):
    """What one attention keeps of each token.

    Attributes:
        heads: key and value heads.
        key_dim, value_dim: of each head; 0 where nothing is kept.
        group: attentions that use the same blocks: a decoder's by how far they look back, and
            those that look at an encoder's output.
        window: tokens that the group looks back, the query's own included; None: all.
    """

    heads: int
    key_dim: int
    value_dim: int
    group: str = "all"
    window: int | None = None


ENCODER = "encoder"  # the group of cross-attention


def cache_group(window: int | None) -> str:
    """The group of a decoder's attention that looks back so far."""
    return "all" if window is None else f"window {window}"


def write(
    cache: LayerCache,
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads value_dim"],
    at: Placement,
) -> LayerCache:
    """Puts new tokens into their places. Padding, and what has no place, is dropped."""
    blocks, _, size, _ = cache.keys.shape
    index = at.positions // size
    here = (at.rows >= 0) & (at.positions >= 0)
    block = at.tables.at[at.rows, index].get(mode="fill", fill_value=blocks)
    # A block below 0 is in another pool.
    block, offset = jnp.where(here & (block >= 0), block, blocks), at.positions % size

    def into(old: Array, rows: Array) -> Array:
        return old.at[block, :, offset].set(rows, mode="drop")

    kept = LayerCache(_as_kept(keys, cache.keys), _as_kept(values, cache.values))
    # Without the barrier XLA:CPU fuses the update into its readers too, and copies the cache.
    return lax.optimization_barrier(trees.map(into, cache, kept))


def _as_kept(new: Array, old: Rows) -> Rows:
    """New vectors as the cache keeps them."""
    if isinstance(old, QuantizedVectors):
        return quantize_vectors(new, old.format)
    if old.dtype == jnp.float16 and new.dtype != jnp.float16:
        limit = float(jnp.finfo(jnp.float16).max)
        new = jnp.clip(new.astype(jnp.float32), -limit, limit)
    return new.astype(old.dtype)


def abstract(
    shapes: Mapping[str, CacheShape], blocks: Mapping[str, int] | int, kind: Kind
) -> Cache:
    """A cache without numbers, of `Abstract`s.

    Args:
        shapes: attention's name -> what it keeps.
        blocks: of each pool: one number for all, or attention's name -> number.
        kind: a type of numbers, or how they are quantized.
    """

    def rows(name: str, width: int) -> Any:
        count = blocks if isinstance(blocks, int) else blocks[name]
        whole = (count, shapes[name].heads, BLOCK, width)
        if isinstance(kind, QuantFormat):
            return kv_vectors.abstract(whole, kind)
        return Abstract(whole, kind)

    return {
        name: LayerCache(rows(name, shape.key_dim), rows(name, shape.value_dim))
        for name, shape in shapes.items()
    }


def empty(shapes: Mapping[str, CacheShape], blocks: Mapping[str, int] | int, kind: Kind) -> Cache:
    """A cache of zeros; arguments as `abstract`."""
    whole = abstract(shapes, blocks, kind)
    return trees.map(lambda one: jnp.zeros(one.shape, one.dtype), whole)


def unwritten(
    shapes: Mapping[str, CacheShape], blocks: Mapping[str, int] | int, kind: Kind
) -> Cache:
    """As `empty`, but where a CPU's system allows it memory is taken only as it is written to.

    What nobody has written may hold anything. To be traced: not every array alone is a program.
    """
    if platform() != "cpu" or not empty_arrays.available():
        return empty(shapes, blocks, kind)
    arrays, tree = trees.flatten(abstract(shapes, blocks, kind))
    return trees.unflatten(
        tree, [empty_arrays.unwritten(one.shape, one.dtype, n) for n, one in enumerate(arrays)]
    )


def nbytes(cache: Cache) -> int:
    """Bytes a cache takes."""
    return sum(leaf.nbytes for leaf in trees.leaves(cache))

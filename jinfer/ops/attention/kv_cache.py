"""KV cache: paged pools of key and value blocks, plain or quantized; state in, state out.

A sequence's tokens are stored in blocks of `BLOCK` tokens anywhere in the pool; its block table
lists them. Several sequences may share blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jinfer.cpu import build_library
from jinfer.cpu.isa import own_isa
from jinfer.ops.backend import backend
from jinfer.quant import kv_vectors
from jinfer.quant.kv_vectors import QuantizedVectors, quantize_vectors
from jinfer.quant_format import Kind, QuantFormat

if TYPE_CHECKING:
    from jaxtyping import Float, Int

LONG_TEXT = 1024  # tokens before a text gets int8 keys; as in attention.h
_ISAS = ("avx512", "avx512bf16", "amx")
_SPLIT = 512  # SPLIT_KEYS of attention.h
_LANES = 16
_DIGEST = slice(8)  # bytes of a block's digest


def int8_keys_are_useful(key_dim: int, value_dim: int, window: int | None) -> bool:
    """Whether int8 keys make attention to a cache of these sizes faster.

    Without values the keys are read as values anyway; a short window has few old keys.
    """
    whole = value_dim > 0 and key_dim % _LANES == value_dim % _LANES == 0
    return whole and (window is None or window >= 4 * _SPLIT)


def abstract_int8_keys(
    blocks: int, heads: int, size: int, key_dim: int, kind: Kind
) -> jax.ShapeDtypeStruct | None:
    """Returns the shape and type of int8 keys; None if the machine or the cache's format has none.

    Args:
        size: tokens of a block.
        kind: number format of the cache.
    """
    if kind not in (jnp.float16, jnp.bfloat16) or backend() != "cpu" or own_isa() not in _ISAS:
        return None
    columns = -(-key_dim // 64) * 64 * size
    ranges = -(-4 * key_dim // 64) * 64
    return jax.ShapeDtypeStruct((blocks, heads, 64 + columns + ranges), jnp.uint8)


def clear_int8_keys(int8_keys: Array, block: Any) -> Array:
    """Invalidates the int8 keys of blocks that were written to; ids out of range are dropped."""
    return int8_keys.at[block, :, _DIGEST].set(jnp.uint8(0), mode="drop")


BLOCK = 64  # tokens

# [blocks, kv_heads, BLOCK, head_dim], plain or with quantized vectors.
type KVPool = Array | QuantizedVectors


class LayerCache(NamedTuple):
    """Keys and values of one attention.

    The tokens of a block are inside the heads, so that attention reads each head's keys
    contiguously.

    Attributes:
        int8_keys: [blocks, kv_heads, bytes], laid out as in attention_int8_cache.h; None: none.
    """

    keys: KVPool
    values: KVPool
    int8_keys: Array | None = None


class IndexedCache(NamedTuple):
    """Keys and values of one attention with an indexer (sparse attention).

    Attributes:
        index_keys: the indexer's keys, [blocks, 1, BLOCK, dim]; None: another layer chooses the
            keys.
        chosen: positions of the keys chosen for each token, in rising order, [tokens, top_k]; only
            set within a step; 0 columns: all keys are seen.
    """

    vectors: LayerCache
    index_keys: KVPool | None
    chosen: Array | None = None


# State of a recurrent block after all tokens so far: arrays [blocks, ...], float32, by name.
type StateCache = dict[str, Array]

Cache = dict[str, Any]  # module name -> LayerCache | IndexedCache | StateCache


class AttentionMetadata(NamedTuple):
    """Positions and block tables of a flat batch (vLLM: attention metadata, slot mapping).

    Tokens of one sequence are adjacent, in rising positions.

    Attributes:
        rows: each token's row of `tables`; -1: padding, which is neither written nor read.
        positions: of each token in its sequence, from 0.
        tables: the block table of each sequence: entry j is the block of positions j * BLOCK .. (j
            + 1) * BLOCK - 1. Unused entries may hold anything.
    """

    rows: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    tables: Int[Array, "rows blocks"]


class CacheShape(NamedTuple):
    """Sizes of an attention's cache.

    Attributes:
        heads: key and value heads.
        key_dim, value_dim: of each head; 0 if nothing is cached.
        group: attentions that share a block table: those of a decoder with the same window, and
            those that look at an encoder's output (cross-attention).
        window: sliding window of the group in tokens, the query's own included; None: unlimited.
        index_dim: of an indexer's key; 0: none.
        int8_keys: whether to keep int8 keys, if machine and format support them.
    """

    heads: int
    key_dim: int
    value_dim: int
    group: str = "all"
    window: int | None = None
    index_dim: int = 0
    int8_keys: bool = False

    def elements(self) -> int:
        """Numbers per token."""
        return self.heads * (self.key_dim + self.value_dim) + self.index_dim


class StateShape(NamedTuple):
    """Sizes of a recurrent block's state, per sequence.

    Attributes:
        arrays: (name, shape) of each array; float32.
    """

    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    group: str = "state"
    window: int | None = None

    def elements(self) -> int:
        """Numbers per token: none."""
        return 0


type CacheShapes = Mapping[str, CacheShape | StateShape]  # by module name

ENCODER = "encoder"  # the group of cross-attention
# key among block tables for the slot and scale of each sequence's adapter, which is no block
ADAPTER = "adapter"
OFFSET = "offset"  # likewise, for what a rotary position is above the token's index
STATE = "state"  # the group of recurrent blocks, whose table has one block a sequence


def cache_group(window: int | None) -> str:
    """The group of a decoder attention with this sliding window."""
    return "all" if window is None else f"window {window}"


def write_cache(
    cache: LayerCache,
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads value_dim"],
    at: AttentionMetadata,
) -> LayerCache:
    """Writes new tokens' keys and values; padding and tokens without a block are dropped."""
    new_keys, new_values = write_vectors((cache.keys, cache.values), (keys, values), at)
    int8_keys = cache.int8_keys
    if int8_keys is not None:
        blocks, _, size, _ = cache.keys.shape
        int8_keys = clear_int8_keys(int8_keys, _slots(at, blocks, size)[0])
    return LayerCache(new_keys, new_values, int8_keys)


def write_vectors(
    pools: Sequence[KVPool],
    vectors: Sequence[Float[Array, "tokens heads dim"]],
    at: AttentionMetadata,
) -> tuple[KVPool, ...]:
    """Writes new tokens' vectors to pools of equal block counts, as `write_cache` does."""
    blocks, _, size, _ = pools[0].shape
    block, offset = _slots(at, blocks, size)

    def into(old: Array, rows: Array) -> Array:
        return old.at[block, :, offset].set(rows, mode="drop")

    kept = tuple(_as_stored(new, old) for new, old in zip(vectors, pools, strict=True))
    # Without the barrier XLA:CPU fuses the update into its readers and copies the cache.
    return lax.optimization_barrier(jax.tree.map(into, tuple(pools), kept))


def _slots(at: AttentionMetadata, blocks: int, size: int) -> tuple[Array, Array]:
    """Returns each token's block (`blocks`: it has none here) and its offset in the block."""
    index = at.positions // size
    here = (at.rows >= 0) & (at.positions >= 0)
    block = at.tables.at[at.rows, index].get(mode="fill", fill_value=blocks)
    # A negative block id belongs to another pool.
    return jnp.where(here & (block >= 0), block, blocks), at.positions % size


def _as_stored(new: Array, old: KVPool) -> KVPool:
    """Converts new vectors to the cache's format."""
    if isinstance(old, QuantizedVectors):
        return quantize_vectors(new, old.format)
    if old.dtype == jnp.float16 and new.dtype != jnp.float16:
        limit = float(jnp.finfo(jnp.float16).max)
        new = jnp.clip(new.astype(jnp.float32), -limit, limit)
    return new.astype(old.dtype)


def abstract_cache(shapes: CacheShapes, blocks: Mapping[str, int] | int, kind: Kind) -> Cache:
    """Returns the shapes and types of a cache, as `jax.ShapeDtypeStruct`s.

    Args:
        shapes: attention name -> sizes of its cache.
        blocks: of each pool: one number for all, or attention name -> number.
        kind: a number type or a quantization format.
    """

    def rows(count: int, heads: int, width: int) -> Any:
        whole = (count, heads, BLOCK, width)
        if isinstance(kind, QuantFormat):
            return kv_vectors.abstract_vectors(whole, kind)
        return jax.ShapeDtypeStruct(whole, kind)

    def of(name: str, shape: CacheShape | StateShape) -> Any:
        count = blocks if isinstance(blocks, int) else blocks[name]
        if isinstance(shape, StateShape):
            return {
                part: jax.ShapeDtypeStruct((count, *width), jnp.float32)
                for part, width in shape.arrays
            }
        keys, values = (rows(count, shape.heads, dim) for dim in (shape.key_dim, shape.value_dim))
        int8_keys: Any = None
        if shape.int8_keys:
            int8_keys = abstract_int8_keys(count, shape.heads, BLOCK, shape.key_dim, kind)
        cache = LayerCache(keys, values, int8_keys)
        return IndexedCache(cache, rows(count, 1, shape.index_dim)) if shape.index_dim else cache

    return {name: of(name, shape) for name, shape in shapes.items()}


def zero_cache(shapes: CacheShapes, blocks: Mapping[str, int] | int, kind: Kind) -> Cache:
    """A cache of zeros; arguments as for `abstract_cache`."""
    whole = abstract_cache(shapes, blocks, kind)
    return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), whole)


def uninitialized_cache(shapes: CacheShapes, blocks: Mapping[str, int] | int, kind: Kind) -> Cache:
    """Like `zero_cache`, but on a CPU memory is only committed as it is written, if possible.

    Contents are undefined. Call it inside a traced program.
    """
    if jax.default_backend() != "cpu" or not build_library.available():
        return zero_cache(shapes, blocks, kind)
    arrays, tree = jax.tree.flatten(abstract_cache(shapes, blocks, kind))
    # Numbered: XLA merges equal calls and copies the result, which would write all of it.
    empty = [
        build_library.custom_call("jinfer_empty", like)(which=np.int32(number))
        for number, like in enumerate(arrays)
    ]
    return jax.tree.unflatten(tree, empty)


def nbytes(tree: Any) -> int:
    """Bytes of a tree's arrays, concrete or abstract."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

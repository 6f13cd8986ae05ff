"""Paged attention and the write of new keys and values, as one custom call."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.cpu.build_library import custom_call, register

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt8

_SYMBOL = "jinfer_attention"
_MAX_GROUP = 192  # query heads per key head


class KvFormat(NamedTuple):
    """Format of a quantized cache; blocks are of 32."""

    bits: int
    levels: int
    per_code: int
    symmetric: bool


class CacheOperands(NamedTuple):
    """Keys or values of the block pool.

    Attributes:
        arrays: [blocks, kv_heads, size, dim], or codes and numbers of each vector.
        dim: numbers of a vector.
    """

    arrays: tuple[Array, ...]
    dim: int


class Scores(NamedTuple):
    """Scaling, masking and biases of scores; as `jinfer.ops.attention.mask_rules.ScoreRules`."""

    scale: float
    softcap: float | None = None
    window: int | None = None
    ahead: int | None = None
    sinks: Float[Array, " heads"] | None = None
    slopes: Float[Array, " heads"] | None = None
    by_distance: Float[Array, "heads distances"] | None = None
    lowest: int = 0


def supported(heads: int, kv_heads: int) -> bool:
    """Whether the custom call exists on this machine, and supports this number of heads."""
    return heads // kv_heads <= _MAX_GROUP and register(_SYMBOL)


def attention(
    q: Float[Array, "tokens heads dim"],
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    last: Int[Array, " tokens"],
    tables: Int[Array, "rows entries"],
    keys: CacheOperands,
    values: CacheOperands | None,
    coding: KvFormat | None,
    scores: Scores,
    new: tuple[Array, ...] | None = None,
    int8_keys: UInt8[Array, "blocks kv_heads bytes"] | None = None,
    *,
    partial: bool = False,
) -> tuple[tuple[Array, ...], tuple[Array, ...], tuple[Array, ...], tuple[Array, ...]]:
    """Computes attention; also returns the arrays of keys, values and int8 keys.

    The call fails if a token or a block is not in the tables or the pool.

    Args:
        rows: each token's row of the tables; -1: padding, which gets zeros.
        last: the last position that each token sees.
        tables: the block of each sequence's positions size * j .. size * (j + 1) - 1; `size` is a
            multiple of 64, or there is one entry.
        values: None: the keys are the values too.
        coding: format of a quantized cache.
        new: [tokens, kv_heads, dim], keys and, unless shared, values of q's type, to be written to
            the pool first. The pool's arrays are changed in place and must not be used again.
        int8_keys: int8 keys of the same blocks (`jinfer.ops.attention.kv_cache`); None: none.
        partial: entries of the tables may be -1: blocks in another pool, neither written nor read.
            The output is then float32 and not normalized, and a second array holds each query's
            maximum score and sum of weights.

    Returns:
        The output [tokens, heads, value_dim], alone or with [tokens, heads, 2]; then the pool's
        parts, each zero or more arrays.
    """
    parts: list[tuple[Array, ...]] = [keys.arrays, () if values is None else values.arrays]
    parts.append(() if int8_keys is None else (int8_keys,))
    cached = tuple(chain.from_iterable(parts))
    optional = (scores.sinks, (0,)), (scores.slopes, (0,)), (scores.by_distance, (0, 0))
    biases = tuple(
        jnp.zeros(none, jnp.float32) if numbers is None else numbers.astype(jnp.float32)
        for numbers, none in optional
    )
    indices = tuple(part.astype(jnp.int32) for part in (rows, positions, last, tables))
    arguments = (q, *indices, *biases, *(new or ()))
    value_dim = keys.dim if values is None else values.dim
    results = [jax.ShapeDtypeStruct((*q.shape[:2], value_dim), q.dtype)]
    if partial:
        sizes = ((*q.shape[:2], value_dim), (*q.shape[:2], 2))
        results = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
    pool = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in cached] if new else []
    bits, levels, per_code, symmetric = coding or KvFormat(0, 0, 1, True)
    count = len(results)
    out = custom_call(
        _SYMBOL,
        [*results, *pool],
        aliases={len(arguments) + i: count + i for i in range(len(pool))},
    )(
        *arguments,
        *cached,
        scale=np.float32(scores.scale),
        softcap=np.float32(scores.softcap or 0.0),
        window=np.int32(-1 if scores.window is None else scores.window),
        ahead=np.int32(-1 if scores.ahead is None else scores.ahead),
        lowest=np.int32(scores.lowest),
        written=bool(new),
        shared=values is None,
        bits=np.int32(bits),
        levels=np.int32(levels),
        per_code=np.int32(per_code),
        symmetric=symmetric,
        dim=np.int32(keys.dim),
        value_dim=np.int32(value_dim),
        int8_keys=int8_keys is not None,
        partial=partial,
    )
    after = iter(out[count:] or cached)
    kept = [tuple(islice(after, len(part))) for part in parts]
    return tuple(out[:count]), kept[0], kept[1], kept[2]

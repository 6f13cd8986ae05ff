"""Flat batches over pools for tests, and attention of one query by its definition.

What a pool holds beyond the tokens that were put into it is NaN, and table entries that nobody
needs name other sequences' blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jinfer.ops.attention.kv_cache import (
    BLOCK,
    AttentionMetadata,
    CacheShape,
    LayerCache,
    write_cache,
    zero_cache,
)
from jinfer.quant.bit_packing import unpack
from jinfer.quant.kv_vectors import QuantizedVectors
from jinfer.quant_format import parse_cache_dtype
from tests.arrays import on_device
from tests.reference.numpy_blocks import Floats

SCALE = 0.3


class Run(NamedTuple):
    """Tokens next to each other of one sequence; row -1: padding."""

    row: int
    start: int
    length: int = 1


def random(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).normal(size=shape)


def f32(x: Any) -> Array:
    return on_device(x, jnp.float32)


def tables_of(lengths: Sequence[int], seed: int = 0, width: int | None = None) -> np.ndarray:
    """A block for each 64 tokens of each sequence, in any order; the other entries are stale."""
    chance = np.random.default_rng(seed)
    counts = [-(-length // BLOCK) for length in lengths]
    order = chance.permutation(sum(counts)).astype(np.int32)
    whole = max(*counts, 1) if width is None else width
    tables = chance.integers(0, max(len(order), 1), (len(counts), whole)).astype(np.int32)
    for row, ids in enumerate(np.split(order, np.cumsum(counts)[:-1])):
        tables[row, : len(ids)] = ids
    return tables


def blocks_of(lengths: Sequence[int]) -> int:
    """How many blocks `tables_of` hands out."""
    return sum(-(-length // BLOCK) for length in lengths)


def placed(runs: Sequence[Run], tables: np.ndarray) -> AttentionMetadata:
    """Where the tokens of these runs stand."""
    rows = np.concatenate([np.full(run.length, run.row, np.int32) for run in runs])
    positions = np.concatenate([run.start + np.arange(run.length, dtype=np.int32) for run in runs])
    return AttentionMetadata(on_device(rows), on_device(positions), on_device(tables))


def unwritten(kind: str, shape: CacheShape, blocks: int) -> LayerCache:
    """A pool of which nothing is a number."""
    cache = jax.eval_shape(lambda: zero_cache({"a": shape}, blocks, parse_cache_dtype(kind)))["a"]

    def no_numbers(x: Any) -> Array:
        other = {np.dtype(np.uint32): 0xABCDEF01, np.dtype(np.uint8): 0xAB}
        return on_device(np.full(x.shape, other.get(x.dtype, np.nan), x.dtype))

    return jax.tree.map(no_numbers, cache)


def filled(
    kind: str, keys: Sequence[Floats], values: Sequence[Floats] | None, tables: np.ndarray
) -> LayerCache:
    """A pool with sequences [tokens, kv_heads, dim] in it; without values for latent attention."""
    blocks = blocks_of([len(each) for each in keys])
    _, heads, dim = keys[0].shape
    shape = CacheShape(heads, dim, 0 if values is None else values[0].shape[2])
    at = placed([Run(row, 0, len(each)) for row, each in enumerate(keys)], tables)
    whole = f32(np.concatenate(keys))
    new = whole[..., :0] if values is None else f32(np.concatenate(values))
    return jax.jit(write_cache)(unwritten(kind, shape, blocks), whole, new, at)


def attended(
    q: Floats, k: Floats, v: Floats, position: int, last: int, head: int, **rules: Any
) -> Floats:
    """One query of one head over keys [keys, dim] and values [keys, value_dim] in float64."""
    at = np.arange(len(k))
    distance = position - at
    see = at <= last
    if "window" in rules:
        see &= distance < rules["window"]
    if "ahead" in rules:
        see &= distance > -rules["ahead"]
    if not see.any():
        return np.zeros(v.shape[1])
    scores = rules.get("scale", SCALE) * k @ q
    if cap := rules.get("softcap"):
        scores = cap * np.tanh(scores / cap)
    if "by_distance" in rules:
        table = np.asarray(rules["by_distance"], np.float64)[head]
        scores = scores + table[np.clip(distance - rules.get("lowest", 0), 0, len(table) - 1)]
    if "slopes" in rules:
        scores = scores - float(rules["slopes"][head]) * distance
    scores, distance = scores[see], distance[see]
    highest = scores.max()
    weights = np.exp(scores - highest)
    sink = np.exp(float(rules["sinks"][head]) - highest) if "sinks" in rules else 0.0
    return weights @ v[see] / (weights.sum() + sink)


def expected(
    q: Floats,
    keys: Sequence[Floats],
    values: Sequence[Floats],
    runs: Sequence[Run],
    last: Sequence[int] | None = None,
    **rules: Any,
) -> Floats:
    """Attention of a flat batch q [tokens, heads, dim]; `last` of each token, else its own."""
    heads, kv_heads = q.shape[1], keys[0].shape[1]
    out = np.zeros((len(q), heads, values[0].shape[2]))
    tokens = [(run.row, run.start + i) for run in runs for i in range(run.length)]
    for t, (row, position) in enumerate(tokens):
        if row < 0:
            continue
        end = position if last is None else last[t]
        for head in range(heads):
            k, v = (x[row][:, head * kv_heads // heads] for x in (keys, values))
            out[t, head] = attended(q[t, head], k, v, position, end, head, **rules)
    return out


def decoded(rows: Any) -> Floats:
    """What the arrays of a cache say, by NumPy."""
    if not isinstance(rows, QuantizedVectors):
        return np.asarray(rows, np.float64)
    format, lead = rows.format, rows.words.shape[:-1]
    codes = unpack(np.asarray(rows.words).reshape(*lead, -1, format.code_bits), format.code_bits)
    if format.per_code == 2:
        codes = np.stack([codes // format.levels, codes % format.levels], axis=-2)
    q = codes.reshape(*lead, -1, 32).astype(np.float64)
    scale, *base = np.moveaxis(
        np.asarray(rows.scales, np.float64).reshape(*lead, -1, format.numbers), -1, 0
    )
    whole = (q + (0 if base else -format.zero)) * scale[..., None]
    whole = whole + base[0][..., None] if base else whole
    return whole.reshape(*lead, -1)[..., : rows.width]


def sequences(rows: Any, tables: np.ndarray, lengths: Sequence[int]) -> list[Floats]:
    """What a pool says that each sequence's tokens [tokens, kv_heads, dim] are."""
    pool = decoded(rows).swapaxes(1, 2)  # [blocks, BLOCK, kv_heads, dim]
    return [
        pool[tables[row, : -(-length // BLOCK)]].reshape(-1, *pool.shape[2:])[:length]
        for row, length in enumerate(lengths)
    ]

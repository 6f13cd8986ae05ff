"""Paged attention tiles of the Mosaic GPU kernel: tokens to tiles of rows, and sums back.

The kernel computes partial softmax sums of whole tiles; XLA gathers the rows before it and finishes
the softmax after it.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from kernels_pallas.attention import grid as pieces
from kernels_pallas.attention import mosaic
from kernels_pallas.attention.batch import QueryBatch, ScoreModifiers
from kernels_pallas.attention.kv_layout import TOKENS, PackedKV
from kernels_pallas.attention.mosaic import LOWEST, TileRows, TileSums, power_of_two
from kernels_pallas.mosaic_common import ROWS

_FAR = 1 << 30  # past any position


class TokenSoftmax(NamedTuple):
    """Softmax over some keys, not normalized, float32.

    Attributes:
        outs: [tokens, heads, value_dim], weighted sum of values.
        highest: [tokens, heads], log2.
        total: [tokens, heads], sum of weights; 0 if no key was seen.
    """

    outs: Array
    highest: Array
    total: Array


def softmax(
    q: Array,
    factors: Array | None,
    keys: PackedKV,
    values: PackedKV | None,
    queries: QueryBatch,
    scores: ScoreModifiers,
    *,
    interpret: bool,
) -> TokenSoftmax:
    """Computes the softmax sums of each token.

    Args:
        q: [tokens, heads, dim] of the keys' type.
        factors: the divisor of each line of q, [tokens * heads].
        queries: checked by `paged_attention`.
        scores: without `by_distance`; sinks are ignored.
    """
    (count, heads, _), kv_heads = q.shape, keys.data.shape[1]
    group, tables = heads // kv_heads, queries.tables
    least = pieces.least_span(keys, values, group)
    shape = pieces.AttentionShape(count, tables.shape[0], tables.shape[1] * TOKENS, kv_heads, group)
    power = pieces.split_powers(queries.low, queries.last, least)
    runs = pieces.runs(queries.rows, power)
    launches = pieces.plan_launches(shape, keys, values, least, mosaic.tile)
    short = runs.length <= launches[0].most
    times = jnp.broadcast_to(jnp.float32(scores.scale), (count, heads))
    if factors is not None:
        times = times * factors.reshape(count, heads)
    slopes = jnp.zeros((heads,)) if scores.slopes is None else scores.slopes
    found: TokenSoftmax | None = None
    for index, launch in enumerate(launches):
        chosen = runs.real if len(launches) == 1 else runs.real & (short if index == 0 else ~short)
        firsts = pieces.first_tokens(runs, chosen, launch)
        rows = _rows(q, times, slopes, queries, power, chosen, firsts, launch, kv_heads)
        # Rows of a tile begin at different keys, so a tile may touch one split more than a row.
        splits = pieces.max_splits(shape, least) + 1
        sums = mosaic.tile_sums(
            rows,
            tables,
            keys,
            values,
            splits=splits,
            parts=launch.parts,
            slopes=scores.slopes is not None,
            softcap=scores.softcap,
            interpret=interpret,
        )
        these = _tokens(_merged(sums, rows.tile), firsts, launch, count, group)
        if found is not None:
            these = TokenSoftmax(
                *(
                    jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)
                    for new, old in zip(these, found, strict=True)
                )
            )
        found = these
    assert found is not None
    seen = runs.real[:, None]
    return TokenSoftmax(
        jnp.where(seen[..., None], found.outs, 0), found.highest, jnp.where(seen, found.total, 0)
    )


def _rows(
    q: Array,
    times: Array,
    slopes: Array,
    queries: QueryBatch,
    power: Array,
    chosen: Array,
    firsts: Array,
    launch: pieces.KernelLaunch,
    kv_heads: int,
) -> TileRows:
    """Returns the rows of each tile: heads of a token, then of the next token of the run."""
    count, heads, dim = q.shape
    size, tiles = launch.tile.rows, launch.pieces * launch.tiles
    group = heads // kv_heads
    row = jnp.arange(launch.tiles * size, dtype=jnp.int32)[None]
    token = firsts[:, None] + row // group  # [pieces, rows]
    known, first = jnp.minimum(token, count - 1), jnp.minimum(firsts, count - 1)[:, None]
    inside = (row < launch.most * group) & (token < count) & chosen[known]
    inside &= (queries.rows[known] == queries.rows[first]) & (power[known] == power[first])
    low = jnp.where(inside, jnp.maximum(queries.low[known], 0), _FAR).reshape(tiles, size)
    last = jnp.where(inside, queries.last[known], -1).reshape(tiles, size)
    bounds = jnp.stack([low, last, queries.positions[known].reshape(tiles, size)], axis=1)

    def of_heads(each: Array) -> Array:
        """[tokens, heads, ...] -> [tiles, kv_heads, rows, ...]."""
        rest = each.shape[2:]
        split = each.reshape(count, kv_heads, group, *rest)
        taken = split[known, :, row % group]  # [pieces, rows, kv_heads, ...]
        return taken.reshape(tiles, size, kv_heads, *rest).swapaxes(1, 2)

    steep = jnp.broadcast_to(slopes.astype(jnp.float32)[None], (count, heads))
    changes = jnp.stack([of_heads(times), of_heads(steep)], axis=2)
    of_piece = jnp.stack([queries.rows[first[:, 0]], power[first[:, 0]]], axis=1)
    of_piece = jnp.repeat(jnp.maximum(of_piece, 0), launch.tiles, axis=0)
    ends = jnp.stack([jnp.min(low, axis=1), jnp.max(last, axis=1) + 1], axis=1)
    filling = ((0, 0), (0, 0), (0, ROWS - size))
    return TileRows(
        jnp.concatenate([of_piece, ends], axis=1).astype(jnp.int32),
        jnp.pad(bounds, filling),
        jnp.pad(changes, ((0, 0), *filling)),
        of_heads(q).reshape(tiles, kv_heads, size, dim),
    )


def _merged(sums: TileSums, tile: Array) -> TileSums:
    """Merges the splits of each tile in order: [tiles, kv_heads, rows, ...]."""
    size = sums.outs.shape[3]
    highest, total = sums.highest[..., :size], sums.total[..., :size]
    places = highest.shape[2]
    if places == 1:
        return TileSums(sums.outs[:, :, 0], highest[:, :, 0], total[:, :, 0])
    _, power, low, end = tile.T
    splits = jnp.where(end > low, ((end - 1) >> power) + 1 - (low >> power), 0)
    there = (jnp.arange(places)[None] < splits[:, None])[:, None, :, None]
    maximum = jnp.max(jnp.where(there, highest, LOWEST), axis=2)
    scale = jnp.where(there, power_of_two(highest - maximum[:, :, None]), 0)

    def added(each: Array) -> Array:
        """Adds in sequence, so that a row's sum does not depend on the number of splits."""
        scales = scale.reshape(*scale.shape, *[1] * (each.ndim - 4))
        parts = jnp.where(scales > 0, each, 0) * scales
        return reduce(add, (parts[:, :, place] for place in range(places)))

    return TileSums(added(sums.outs), maximum, added(total))


def _tokens(
    sums: TileSums, firsts: Array, launch: pieces.KernelLaunch, count: int, group: int
) -> TokenSoftmax:
    """Returns the rows of the tiles as tokens; undefined for tokens without a tile."""
    token = jnp.arange(count, dtype=jnp.int32)
    piece = jnp.maximum(jnp.sum(firsts[None] <= token[:, None], axis=1, dtype=jnp.int32) - 1, 0)
    row = (token - firsts[piece])[:, None] * group + jnp.arange(group, dtype=jnp.int32)[None]
    row = jnp.clip(row, 0, launch.tiles * launch.tile.rows - 1)
    at = piece[:, None] * launch.tiles + row // launch.tile.rows  # [tokens, group]

    def combine_pieces(each: Array) -> Array:
        found = each[at, :, row % launch.tile.rows]  # [tokens, group, kv_heads, ...]
        return found.swapaxes(1, 2).reshape(count, -1, *each.shape[3:])

    return TokenSoftmax(*(combine_pieces(each) for each in sums))

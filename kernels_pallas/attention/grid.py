"""Paged attention grid: how a batch is split into programs (flash decoding, split-KV).

Queries: a piece is some adjacent tokens of one run; a program takes the query heads of a piece that
share a key head (GQA). Keys: a split is a power of two of them, aligned to a multiple of it; its
size depends on how many keys a token sees, not on the rest of the batch. Each split has its own
softmax, and splits are merged in order, both if one program computes all of them and if each has
its own program. So results are batch-invariant to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.matmul.grid import MULTIPROCESSORS

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from kernels_pallas.attention.kv_layout import PackedKV

SPLITS = 32  # of a token's keys, at most
_LEAST_SPAN = 128
_FEW_ROWS = 16  # of a tile: the minimum of tensor cores
# Not 64: Hopper then uses another instruction, whose sums may have other bits.
_MANY_ROWS = 32
_SUMS = 64  # result numbers that fit into a thread's registers
_WIDE = 256  # numbers of a value that four warps hold; wider ones need eight
_BOTH = 768  # key plus value width of which shared memory holds 64 twice
_FEW_TOKENS = 64  # a batch with only small pieces
_PROGRAMS = 4 * MULTIPROCESSORS
_PARTIAL_BYTES = 128 << 20


class Tile(NamedTuple):
    """A program's tile: rows of queries (token, head) and keys."""

    rows: int
    keys: int
    warps: int


class KernelLaunch(NamedTuple):
    """One call of the kernel.

    Attributes:
        tile: of each program.
        max_tokens: of a piece.
        pieces: max number of pieces.
        tiles: tiles of a piece, in parallel.
        parts: programs that share the splits of a piece; with one, no splits are written to memory.
        tokens: max number of tokens, if splits are written.
    """

    tile: Tile
    max_tokens: int
    pieces: int
    tiles: int
    parts: int
    tokens: int


class AttentionShape(NamedTuple):
    """Shapes that determine the launches; equal shapes give equal programs.

    Attributes:
        tokens: tokens of the batch.
        rows: of the block tables: max number of runs.
        length: of the block tables, in keys.
        kv_heads, group: key heads, and query heads per key head.
    """

    tokens: int
    rows: int
    length: int
    kv_heads: int
    group: int


def tile(keys: PackedKV, values: PackedKV | None, *, many: bool) -> Tile:
    """Returns the largest tile that registers and shared memory hold."""
    read = [keys] if values is None else [keys, values]
    width = read[-1].padded
    if any(part.tile_type == jnp.float32 for part in read):
        # Without tensor cores cost is proportional to rows.
        return Tile(_FEW_ROWS, 32, 4 if width <= _WIDE // 2 else 8)
    warps = 4 if width <= _WIDE else 8
    # A split's sums, and those of its predecessors.
    fitting = 1 << max(0, (_SUMS * 32 * warps // (2 * width)).bit_length() - 1)
    rows = max(_FEW_ROWS, min(_MANY_ROWS, fitting)) if many else _FEW_ROWS
    return Tile(rows, 64 if sum(part.dim for part in read) <= _BOTH else 32, warps)


def least_span(keys: PackedKV, values: PackedKV | None, group: int) -> int:
    """Returns the keys of the smallest split: larger if its sums cost more relative to the keys."""
    read = [keys] if values is None else [keys, values]
    vectors = keys.data.shape[0] * keys.data.shape[1] * keys.data.shape[2]
    of_a_key = sum(part.nbytes for part in read) / vectors
    span = _LEAST_SPAN
    while span * of_a_key < 4 * group * read[-1].padded:
        span *= 2
    return span


def max_splits(shape: AttentionShape, least: int) -> int:
    """Returns the maximum number of splits of a token."""
    return min(SPLITS, -(-shape.length // least))


def plan_launches(
    shape: AttentionShape,
    keys: PackedKV,
    values: PackedKV | None,
    least: int,
) -> list[KernelLaunch]:
    """Returns the kernel calls: one for short runs, and one for long runs if they fit the batch."""
    few, many = (tile(keys, values, many=many) for many in (False, True))
    small, large = (max(1, form.rows // shape.group) for form in (few, many))
    # A run is cut where the split size changes; at least this many tokens apart.
    cut = min(shape.tokens, 2 * shape.rows + shape.tokens // (SPLITS * _LEAST_SPAN // 2))
    count = max_splits(shape, least)
    width = (keys if values is None else values).padded

    def launch(tile: Tile, max_tokens: int, pieces: int, tokens: int) -> KernelLaunch:
        tiles = -(-max_tokens * shape.group // tile.rows)
        programs = pieces * tiles * shape.kv_heads
        parts = 1 if programs >= _PROGRAMS else min(count, -(-_PROGRAMS // programs))
        if 4 * tokens * count * shape.kv_heads * shape.group * width > _PARTIAL_BYTES:
            parts = 1
        return KernelLaunch(tile, max_tokens, pieces, tiles, parts, tokens)

    if shape.tokens <= _FEW_TOKENS or large == small:
        only = few if shape.tokens <= _FEW_TOKENS else many
        pieces = min(shape.tokens, cut + shape.tokens // small)
        return [launch(only, small, pieces, shape.tokens)]
    pieces = min(shape.tokens, cut + shape.tokens // large)
    return [
        launch(few, small, cut, min(shape.tokens, cut * small)),
        launch(many, large, pieces, shape.tokens),
    ]


def split_powers(
    low: Int[Array, " tokens"], last: Int[Array, " tokens"], least: int
) -> Int[Array, " tokens"]:
    """Returns log2 of the keys per split: the least that leaves at most `SPLITS` splits."""
    # Keys that begin and end inside splits touch one more split than they fill.
    need = jnp.maximum(last - low, 0) // (SPLITS - 1)
    return jnp.maximum(32 - lax.clz(need), least.bit_length() - 1)


class QueryRuns(NamedTuple):
    """Runs of a batch, cut where the split size changes.

    Attributes:
        place: index of each token in its run.
        length: of each token's run.
        real: which tokens are not padding.
    """

    place: Int[Array, " tokens"]
    length: Int[Array, " tokens"]
    real: Bool[Array, " tokens"]


def runs(rows: Int[Array, " tokens"], power: Int[Array, " tokens"]) -> QueryRuns:
    """Finds the runs."""
    count = rows.shape[0]
    index = jnp.arange(count, dtype=jnp.int32)
    begins = (rows[1:] != rows[:-1]) | (power[1:] != power[:-1])
    begins = jnp.concatenate([jnp.ones((1,), jnp.bool_), begins])
    first = lax.cummax(jnp.where(begins, index, 0))
    after = jnp.where(jnp.roll(begins, -1).at[-1].set(True), index + 1, count)
    return QueryRuns(index - first, lax.cummin(after, reverse=True) - first, rows >= 0)


def first_tokens(
    runs: QueryRuns, chosen: Bool[Array, " tokens"], launch: KernelLaunch
) -> Int[Array, " pieces"]:
    """Returns the first token of each piece of the chosen runs; past the end for unused pieces."""
    begins = runs.real & chosen & (runs.place % launch.max_tokens == 0)
    count = runs.place.shape[0]
    return jnp.nonzero(begins, size=launch.pieces, fill_value=count)[0].astype(jnp.int32)

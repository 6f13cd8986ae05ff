"""How attention over a paged cache is cut into programs.

Queries: a piece is some tokens of one run, next to each other; a program takes the query heads of a
piece that share a key head. Keys: a split is a power of two of them, from a multiple of it on; its
size follows from how many keys a token sees, not from who is in the batch with it. The softmax of a
split is begun anew and the splits are merged in their order, whether one program computes all of
them or each its own. So a token's result has the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.matmul.grid import MULTIPROCESSORS

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from kernels_pallas.attention.kv_layout import Kept

SPLITS = 32  # of the keys that a token sees, at most
_LEAST_SPAN = 128
_FEW_ROWS = 16  # of a tile: what tensor cores take at least
# Not 64: Hopper's tensor cores then have another instruction, whose sums may have other bits.
_MANY_ROWS = 32
_SUMS = 64  # numbers of the result that a thread's registers hold beside all else
_WIDE = 256  # numbers of a value that four warps hold; eight hold more
_BOTH = 768  # numbers of a key and a value, of which shared memory holds 64 twice
_FEW_TOKENS = 64  # of a batch whose pieces are all small
_PROGRAMS = 4 * MULTIPROCESSORS
_PARTIAL_BYTES = 128 << 20


class Tile(NamedTuple):
    """What a program takes at a time: rows of queries (token, head) and keys."""

    rows: int
    keys: int
    warps: int


class Launch(NamedTuple):
    """A call of the kernel.

    Attributes:
        tile: of each program.
        most: tokens of a piece.
        pieces: how many there are at most.
        tiles: of a piece, side by side.
        parts: programs that share the splits of a piece; with one no splits are written to memory.
        tokens: how many it is for at most, where splits are written.
    """

    tile: Tile
    most: int
    pieces: int
    tiles: int
    parts: int
    tokens: int


class Shape(NamedTuple):
    """What the launches depend on; the same numbers always give the same programs.

    Attributes:
        tokens: of the batch.
        rows: of the tables: runs that there are at most.
        length: of the tables, in keys.
        kv_heads, group: key heads, and the query heads of each.
    """

    tokens: int
    rows: int
    length: int
    kv_heads: int
    group: int


def tile(keys: Kept, values: Kept | None, *, many: bool) -> Tile:
    """As much as registers and shared memory hold."""
    read = [keys] if values is None else [keys, values]
    width = read[-1].padded
    if any(part.tile_type == jnp.float32 for part in read):
        # Without tensor cores: more rows would cost as much more.
        return Tile(_FEW_ROWS, 32, 4 if width <= _WIDE // 2 else 8)
    warps = 4 if width <= _WIDE else 8
    # A split's sums, and those of the splits before it.
    fitting = 1 << max(0, (_SUMS * 32 * warps // (2 * width)).bit_length() - 1)
    rows = max(_FEW_ROWS, min(_MANY_ROWS, fitting)) if many else _FEW_ROWS
    return Tile(rows, 64 if sum(part.dim for part in read) <= _BOTH else 32, warps)


def least_span(keys: Kept, values: Kept | None, group: int) -> int:
    """Keys of the smallest split: the more its sums weigh against what was read, the more."""
    read = [keys] if values is None else [keys, values]
    vectors = keys.data.shape[0] * keys.data.shape[1] * keys.data.shape[2]
    of_a_key = sum(part.nbytes for part in read) / vectors
    span = _LEAST_SPAN
    while span * of_a_key < 4 * group * read[-1].padded:
        span *= 2
    return span


def splits(shape: Shape, least: int) -> int:
    """How many a token has at most."""
    return min(SPLITS, -(-shape.length // least))


def launches(
    shape: Shape, keys: Kept, values: Kept | None, least: int, form: Callable[..., Tile] = tile
) -> list[Launch]:
    """The calls: one for short runs, and one for long ones where the batch has room for them.

    Args:
        form: gives the tiles of a kind of kernel.
    """
    few, many = (form(keys, values, many=each) for each in (False, True))
    small, large = (max(1, each.rows // shape.group) for each in (few, many))
    # Where the splits' size changes a run is cut; again not before as many tokens as here.
    cut = min(shape.tokens, 2 * shape.rows + shape.tokens // (SPLITS * _LEAST_SPAN // 2))
    count = splits(shape, least)
    width = (keys if values is None else values).padded

    def launch(tile: Tile, most: int, pieces: int, tokens: int) -> Launch:
        tiles = -(-most * shape.group // tile.rows)
        programs = pieces * tiles * shape.kv_heads
        parts = 1 if programs >= _PROGRAMS else min(count, -(-_PROGRAMS // programs))
        if 4 * tokens * count * shape.kv_heads * shape.group * width > _PARTIAL_BYTES:
            parts = 1
        return Launch(tile, most, pieces, tiles, parts, tokens)

    if shape.tokens <= _FEW_TOKENS or large == small:
        only = few if shape.tokens <= _FEW_TOKENS else many
        pieces = min(shape.tokens, cut + shape.tokens // small)
        return [launch(only, small, pieces, shape.tokens)]
    pieces = min(shape.tokens, cut + shape.tokens // large)
    return [
        launch(few, small, cut, min(shape.tokens, cut * small)),
        launch(many, large, pieces, shape.tokens),
    ]


def powers(
    low: Int[Array, " tokens"], last: Int[Array, " tokens"], least: int
) -> Int[Array, " tokens"]:
    """Of two, the keys of a token's splits: the least that leaves no more than `SPLITS` of them."""
    # Keys that begin and end within splits touch one more of them than they fill.
    need = jnp.maximum(last - low, 0) // (SPLITS - 1)
    return jnp.maximum(32 - lax.clz(need), least.bit_length() - 1)


class Runs(NamedTuple):
    """The runs of a batch, cut where the splits' size changes.

    Attributes:
        place: of each token in its run.
        length: of each token's run.
        real: which tokens are no padding.
    """

    place: Int[Array, " tokens"]
    length: Int[Array, " tokens"]
    real: Bool[Array, " tokens"]


def runs(rows: Int[Array, " tokens"], power: Int[Array, " tokens"]) -> Runs:
    """Finds them."""
    count = rows.shape[0]
    index = jnp.arange(count, dtype=jnp.int32)
    begins = (rows[1:] != rows[:-1]) | (power[1:] != power[:-1])
    begins = jnp.concatenate([jnp.ones((1,), jnp.bool_), begins])
    first = lax.cummax(jnp.where(begins, index, 0))
    after = jnp.where(jnp.roll(begins, -1).at[-1].set(True), index + 1, count)
    return Runs(index - first, lax.cummin(after, reverse=True) - first, rows >= 0)


def firsts(runs: Runs, chosen: Bool[Array, " tokens"], launch: Launch) -> Int[Array, " pieces"]:
    """The first token of each piece of the chosen runs; beyond all where there is none."""
    begins = runs.real & chosen & (runs.place % launch.most == 0)
    count = runs.place.shape[0]
    return jnp.nonzero(begins, size=launch.pieces, fill_value=count)[0].astype(jnp.int32)

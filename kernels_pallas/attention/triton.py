"""Paged attention kernels, Triton-style back end: `attend_pieces` and the flash-decoding merge.

Queries, results and sums of splits are addressed by line: token * heads + head for a query.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.attention.grid import KernelLaunch
from kernels_pallas.attention.kv_layout import TOKENS, PackedKV, load_tiles
from kernels_pallas.triton_ops import first_program_id, plt


class TokenMetadata(NamedTuple):
    """Metadata of each token of the batch, int32 [tokens].

    Attributes:
        rows: its row of the block tables; -1 for padding.
        positions: in its sequence.
        low, last: the first and last key it sees.
        power: its splits are 2 ** power keys each.
        place: index of its sums among the tokens whose splits are written to memory.
    """

    rows: Any
    positions: Any
    low: Any
    last: Any
    power: Any
    place: Any


class ScoreOperands(NamedTuple):
    """Operands of score modifiers; any may be None.

    Attributes:
        factors: the divisor of each line of queries.
        slopes: ALiBi slope of each head.
        by_distance: [heads, distances], a bias.
    """

    factors: Any
    slopes: Any
    by_distance: Any


class KernelOperands(NamedTuple):
    """The kernel's operands."""

    firsts: Any
    tokens: TokenMetadata
    tables: Any
    q: Any
    changes: ScoreOperands
    sinks: Any
    keys: list[Any]
    values: list[Any] | None


class TritonConfig(NamedTuple):
    """Compile-time configuration of a kernel; of keys and values only their form.

    With `partial` a block may be -1, which is masked, and results are partial sums.
    """

    keys: PackedKV
    values: PackedKV | None
    heads: int
    scale: float
    softcap: float | None
    lowest: int
    launch: KernelLaunch
    splits: int
    asm: bool
    partial: bool = False

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Returns (first, count) of the numbers of each tile of the results."""
        return (self.keys if self.values is None else self.values).spans()


_NEVER = -1e30  # masked score: with -inf differences would be NaN
_FAR = 1 << 30  # past any position
_MERGED = 256  # numbers of a tile of sums
_AT_ONCE = 2  # splits whose sums are loaded before they are merged


class SoftmaxSums(NamedTuple):
    """Partial softmax of rows over some keys.

    Attributes:
        outs: weighted sums of values, tile by tile, then of ones.
        highest: the maximum score.
    """

    outs: tuple[Any, ...]
    highest: Any


def attend_pieces(
    operands: KernelOperands, static: TritonConfig, dtype: Any, *, interpret: bool
) -> tuple[Array, ...]:
    """Computes attention of the pieces' tokens, [tokens, heads, padded]; others are undefined.

    If partial: float32 weighted sums of values, maximum scores, sums of weights.
    """
    launch = static.launch
    count, kv_heads = operands.tokens.rows.shape[0], static.keys.data.shape[1]
    width = sum(numbers for _, numbers in static.spans)
    result = [jax.ShapeDtypeStruct((count * static.heads, width), dtype)]
    if static.partial:
        result += 2 * [jax.ShapeDtypeStruct((count * static.heads,), jnp.float32)]
    lines = launch.tokens * static.splits * static.heads
    per_line = jax.ShapeDtypeStruct((lines,), jnp.float32)
    sums = [jax.ShapeDtypeStruct((lines, width), jnp.float32), per_line, per_line]
    out = pl.pallas_call(
        functools.partial(_pieces_kernel, static=static),
        out_shape=result if launch.parts == 1 else sums,
        grid=(launch.pieces * launch.tiles, kv_heads, launch.parts),
        compiler_params=plt.CompilerParams(num_warps=launch.tile.warps, num_stages=2),
        interpret=interpret,
        name="decode_attention",
    )(operands)
    if launch.parts > 1:
        out = _merge_splits(
            operands.tokens, operands.sinks, out, static, result, interpret=interpret
        )
    return tuple(jnp.reshape(part, (count, static.heads, *part.shape[1:])) for part in out)


def _merge_splits(
    tokens: TokenMetadata,
    sinks: Any,
    sums: Any,
    static: TritonConfig,
    result: list[jax.ShapeDtypeStruct],
    *,
    interpret: bool,
) -> list[Array]:
    """Merges the sums of the splits to results."""
    max_splits = max(1, _MERGED // result[0].shape[1])
    rows = min(1 << (max_splits.bit_length() - 1), 1 << (static.heads - 1).bit_length())
    return pl.pallas_call(
        functools.partial(_merge_kernel, static=static, rows=rows),
        out_shape=result,
        grid=(tokens.rows.shape[0], -(-static.heads // rows)),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="merge_attention",
    )(tokens, sinks, sums)


def _pieces_kernel(operands: KernelOperands, *outs: Any, static: TritonConfig) -> None:
    launch, tile = static.launch, static.launch.tile
    heads, kv_heads = static.heads, static.keys.data.shape[1]
    group, count = heads // kv_heads, operands.tokens.rows.shape[0]
    piece, head, part = first_program_id(asm=static.asm), pl.program_id(1), pl.program_id(2)
    first = operands.firsts[piece // launch.tiles]
    known = jnp.minimum(first, count - 1)
    sequence, power = operands.tokens.rows[known], operands.tokens.power[known]

    # Rows of the tile: heads of a token, then of the next token of the run.
    row = piece % launch.tiles * tile.rows + lax.iota(jnp.int32, tile.rows)
    token = jnp.minimum(first + row // group, count - 1)
    inside = (row < launch.max_tokens * group) & (first + row // group < count)
    inside &= _at(operands.tokens.rows, token, inside, -1) == sequence
    inside &= _at(operands.tokens.power, token, inside, 0) == power
    low, last = (
        _at(ref, token, inside, other)
        for ref, other in ((operands.tokens.low, _FAR), (operands.tokens.last, -1))
    )
    query_head = head * group + row % group
    line = token * heads + query_head
    q = [_tile(operands.q, line, span, inside) for span in static.keys.spans()]
    change = _score_modifier(operands, static, line, token, query_head, inside)

    size, blocks = tile.keys, operands.tables.shape[1]
    sequence, lowest, end = jnp.maximum(sequence, 0), jnp.min(low), jnp.max(last) + 1

    def block_of(start: Array) -> Array:
        return operands.tables[sequence, jnp.minimum(start // TOKENS, blocks - 1)]

    # The splits of this part, in steps aligned to their size.
    before, within = lowest >> power, (1 << power) - 1
    per_part = (
        jnp.maximum(((end - 1) >> power) + 1 - before, 0) + launch.parts - 1
    ) // launch.parts
    begin = jnp.maximum((before + part * per_part) << power, lowest // size * size)
    stop = jnp.minimum((before + (part + 1) * per_part) << power, end)
    place = _at(operands.tokens.place, token, inside, 0)

    def keep(sums: SoftmaxSums, start: Array) -> None:
        """Writes the sums of this step's split."""
        index = start >> power
        # Splits that a row does not see would overwrite its other splits.
        mine = inside & (index >= low >> power) & (index <= last >> power)
        at = (place * static.splits + index % static.splits) * heads + query_head
        _store_sums(outs, at, static, sums, mine)

    def step(
        i: Array, state: tuple[SoftmaxSums, SoftmaxSums | None, Array]
    ) -> tuple[SoftmaxSums, SoftmaxSums | None, Array]:
        sums, whole, block = state
        start = begin + i * size
        places = start + lax.iota(jnp.int32, size)
        there = (places >= lowest) & (places < end)
        if static.partial:
            there &= block >= 0
            block = jnp.maximum(block, 0)
        offset = 0 if size == TOKENS else start % TOKENS
        where = (block, head, pl.ds(offset, size))
        k = load_tiles(static.keys, operands.keys, where, there, asm=static.asm)
        v = k
        if static.values is not None and operands.values is not None:
            v = load_tiles(static.values, operands.values, where, there, asm=static.asm)
        scores = jnp.zeros((tile.rows, size), jnp.float32)
        for left, right in zip(q, k, strict=True):
            scores += _dot(left, right, trans_b=True)
        sees = (places[None, :] >= low[:, None]) & (places[None, :] <= last[:, None])
        if static.partial:
            sees &= there[None, :]
        scores = jnp.where(sees, change(scores, places, sees), np.float32(_NEVER))
        fresh = (start & within) == 0
        highest = jnp.where(fresh, np.float32(_NEVER), sums.highest)
        maximum = jnp.maximum(highest, jnp.max(scores, axis=1))
        weights = jnp.where(sees, jnp.exp(scores - maximum[:, None]), np.float32(0))
        scale = jnp.where(fresh, np.float32(0), jnp.exp(highest - maximum))[:, None]
        # Tensor cores sum the weights too: in the same order for any rows of the tile. With more
        # columns than rows its warps divide columns, as in the other matmuls.
        ones = jnp.ones((size, 2 * tile.rows), v[0].dtype)
        sums = SoftmaxSums(
            tuple(
                out * scale + _dot(weights.astype(right.dtype), right)
                for out, right in zip(sums.outs, [*v, ones], strict=True)
            ),
            maximum,
        )
        ends = ((start + size) & within == 0) | (start + size >= stop)
        if whole is None:
            lax.cond(ends, lambda: keep(_summed(sums), start), lambda: None)
        else:
            whole = lax.cond(ends, _merged, lambda whole, _: whole, whole, sums)
        return sums, whole, block_of(start + size)

    nothing = _empty_softmax(tile.rows, static)
    steps = (jnp.maximum(stop - begin, 0) + size - 1) // size
    state = nothing, nothing if launch.parts == 1 else None, block_of(begin)
    whole = lax.fori_loop(0, steps, step, state)[1]
    if whole is not None:
        sinks = None if operands.sinks is None else _at(operands.sinks, query_head, inside, 0.0)
        _store_results(outs, line, static, _summed(whole), sinks, inside)


def _merge_kernel(
    tokens: TokenMetadata,
    sinks_ref: Any,
    sums_refs: Any,
    *outs: Any,
    static: TritonConfig,
    rows: int,
) -> None:
    (outs_ref, highest_ref, total_ref), token = sums_refs, first_program_id(asm=static.asm)
    head = pl.program_id(1) * rows + lax.iota(jnp.int32, rows)
    real = head < static.heads
    power, low, last, place = (
        part[token] for part in (tokens.power, tokens.low, tokens.last, tokens.place)
    )
    before = low >> power
    splits = jnp.where(last >= low, (last >> power) + 1 - before, 0)

    def of_split(i: Array) -> SoftmaxSums:
        there = real & (i < splits)
        at = (place * static.splits + (before + i) % static.splits) * static.heads + head
        tiles = (_tile(outs_ref, at, span, there) for span in static.spans)
        return SoftmaxSums(
            (*tiles, _at(total_ref, at, there, 0)), _at(highest_ref, at, there, _NEVER)
        )

    def step(i: Array, sums: SoftmaxSums) -> SoftmaxSums:
        # All loads are issued before the first sum. A missing split changes no bit.
        some = [of_split(i * _AT_ONCE + offset) for offset in range(_AT_ONCE)]
        return functools.reduce(_merged, some, sums)

    nothing = _summed(_empty_softmax(rows, static))
    sums = lax.fori_loop(0, pl.cdiv(splits, _AT_ONCE), step, nothing)
    sinks = None if sinks_ref is None else _at(sinks_ref, head, real, 0.0)
    _store_results(outs, token * static.heads + head, static, sums, sinks, real)


def _score_modifier(
    operands: KernelOperands,
    static: TritonConfig,
    line: Array,
    token: Array,
    head: Array,
    inside: Array,
) -> Any:
    """Returns the function that modifies scores."""
    factors, slopes, by_distance = operands.changes
    factor: Any = np.float32(static.scale)
    if factors is not None:
        factor = (_at(factors, line, inside, 0.0) * factor)[:, None]
    if slopes is not None:
        slopes = _at(slopes, head, inside, 0.0)[:, None]
    near = slopes is not None or by_distance is not None
    position = _at(operands.tokens.positions, token, inside, 0) if near else None

    def change(scores: Array, place: Array, sees: Array) -> Array:
        scores = scores * factor
        if static.softcap is not None:
            scores = np.float32(static.softcap) * _tanh(scores / np.float32(static.softcap))
        if position is None:
            return scores
        distance = position[:, None] - place[None, :]
        if by_distance is not None:
            column = jnp.clip(distance - static.lowest, 0, by_distance.shape[1] - 1)
            rows = jnp.broadcast_to(head[:, None], column.shape)
            scores += plt.load(by_distance.at[rows, column], mask=sees, other=np.float32(0))
        if slopes is not None:
            scores -= slopes * distance.astype(jnp.float32)
        return scores

    return change


def _empty_softmax(rows: int, static: TritonConfig) -> SoftmaxSums:
    """Returns the softmax over no keys."""
    counts = [*(count for _, count in static.spans), 2 * rows]
    outs = tuple(jnp.zeros((rows, count), jnp.float32) for count in counts)
    return SoftmaxSums(outs, jnp.full((rows,), _NEVER, jnp.float32))


def _summed(sums: SoftmaxSums) -> SoftmaxSums:
    """Replaces equal columns of the sum of weights by one, [rows]."""
    *outs, ones = sums.outs
    return SoftmaxSums((*outs, jnp.max(ones, axis=1)), sums.highest)


def _merged(a: SoftmaxSums, b: SoftmaxSums) -> SoftmaxSums:
    """Merges softmax sums over disjoint keys."""
    maximum = jnp.maximum(a.highest, b.highest)
    scales = jnp.exp(a.highest - maximum), jnp.exp(b.highest - maximum)
    outs = []
    for left, right in zip(a.outs, b.outs, strict=True):
        x, y = (scale.reshape(-1, *[1] * (left.ndim - 1)) for scale in scales)
        outs.append(left * x + right * y)
    return SoftmaxSums(tuple(outs), maximum)


def _finished(sums: SoftmaxSums, sinks: Array | None) -> tuple[Array, ...]:
    """Normalizes values; sinks take part in the sum; zeros if no key was seen."""
    *outs, total = sums.outs
    if sinks is not None:
        maximum = jnp.maximum(sums.highest, sinks)
        scale = jnp.exp(sums.highest - maximum)
        total = total * scale + jnp.exp(sinks - maximum)
        outs = [out * scale[:, None] for out in outs]
    total = jnp.where(total == 0, np.float32(1), total)[:, None]
    return tuple(out / total for out in outs)


def _store_results(
    outs: Any,
    line: Array,
    static: TritonConfig,
    sums: SoftmaxSums,
    sinks: Array | None,
    mask: Array,
) -> None:
    if static.partial:
        _store_sums(outs, line, static, sums, mask)
    else:
        _store(outs[0], line, static, _finished(sums, sinks), mask)


def _store_sums(
    outs: Any, line: Array, static: TritonConfig, sums: SoftmaxSums, mask: Array
) -> None:
    _store(outs[0], line, static, sums.outs[:-1], mask)
    line = jnp.where(mask, line, outs[1].shape[0])
    plt.store(outs[1].at[line], sums.highest, mask=mask)
    plt.store(outs[2].at[line], sums.outs[-1], mask=mask)


def _store(ref: Any, line: Array, static: TritonConfig, outs: Any, mask: Array) -> None:
    # A masked line must not alias another: interpret mode writes back the numbers it read.
    line = jnp.where(mask, line, ref.shape[0])
    for out, span in zip(outs, static.spans, strict=True):
        where, full = _places(line, span, mask)
        plt.store(ref.at[where], out.astype(ref.dtype), mask=full)


def _tile(ref: Any, line: Array, span: tuple[int, int], mask: Array) -> Array:
    """Loads numbers of some lines [lines, count], zeros where masked."""
    where, full = _places(line, span, mask)
    return plt.load(ref.at[where], mask=full, other=np.zeros((), ref.dtype))


def _places(line: Array, span: tuple[int, int], mask: Array) -> tuple[tuple[Array, Array], Array]:
    """Returns a tile's indices, both as arrays for interpret mode, and its mask."""
    shape = (line.shape[0], span[1])
    column = span[0] + lax.broadcasted_iota(jnp.int32, shape, 1)
    return (jnp.broadcast_to(line[:, None], shape), column), jnp.broadcast_to(mask[:, None], shape)


def _at(ref: Any, index: Array, mask: Array, other: float) -> Array:
    """Loads ref[index], or `other` where masked."""
    return plt.load(ref.at[index], mask=mask, other=np.asarray(other, ref.dtype))


def _dot(a: Array, b: Array, trans_b: bool = False) -> Array:
    return plt.dot(a, b, trans_b=trans_b, allow_tf32=False if a.dtype == jnp.float32 else None)


def _tanh(x: Array) -> Array:
    return 1 - 2 / (jnp.exp(2 * x) + 1)

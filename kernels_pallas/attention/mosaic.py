"""Paged attention kernel, Mosaic GPU back end (flash decoding): softmax sums, tile by tile.

A program takes a tile of rows (heads of tokens of one run) and copies block after block of the
cache into shared memory as stored: the 64 keys of a head are contiguous. The softmax is base two
with an integer maximum, so that rescaling multiplies by a power of two, which is exact: sums are
the same in any order of merging.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas import mosaic_common
from kernels_pallas.attention.grid import Tile
from kernels_pallas.attention.kv_layout import TOKENS, PackedKV
from kernels_pallas.mosaic_common import ROWS, broadcast_columns, plgpu

LOWEST = -(2.0**20)  # the maximum score of no keys
_NEVER = -1e30  # masked score: with -inf differences would be NaN
_WIDEST = 256  # numbers of a key or a value
_MOST_COLUMNS = 192  # of a value, per program
_COLUMNS = 128  # of a value, accumulated at once in registers
_LOG2_E = math.log2(math.e)


class TileRows(NamedTuple):
    """Metadata of the rows of each tile.

    Attributes:
        tile: int32 [tiles, 4]: row of the block tables, log2 of a split's keys, and the first key
            any row sees and the one after the last.
        bounds: int32 [tiles, 3, ROWS]: first and last key a row sees, and its position.
        changes: float32 [tiles, kv_heads, 2, ROWS]: score factors, and ALiBi slopes.
        q: [tiles, kv_heads, rows, dim].
    """

    tile: Any
    bounds: Any
    changes: Any
    q: Any


class TileSums(NamedTuple):
    """Partial softmax over the keys of splits, per tile: float32 [tiles, kv_heads, splits, ...].

    Attributes:
        outs: [..., rows, value_dim], weighted sum of values.
        highest: [..., ROWS], log2: an integer not below the maximum score.
        total: [..., ROWS], sum of weights.
    """

    outs: Any
    highest: Any
    total: Any


class MosaicConfig(NamedTuple):
    """Compile-time configuration of a kernel; of keys and values only their form.

    Attributes:
        splits: slots for splits; with parts = 1 a single one, for all of them together.
        parts: programs that share the splits of a tile.
        slopes, softcap: score modifiers.
    """

    keys: PackedKV
    values: PackedKV | None
    splits: int
    parts: int
    slopes: bool
    softcap: float | None


def mosaic_supports(keys: PackedKV, values: PackedKV | None) -> bool:
    """Whether the kernel supports these keys and values: 16-bit and not too wide."""
    each = [keys] if values is None else [keys, values]
    kinds = {jnp.dtype(part.tile_type) for part in each}
    if len(kinds) > 1 or any(part.quantized for part in each):
        return False
    whole = all(part.dim % 16 == 0 and part.dim <= _WIDEST for part in each)
    halves = each[-1].dim % (16 * _halves(each[-1].dim)) == 0
    return whole and halves and kinds < {jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)}


def tile(keys: PackedKV, values: PackedKV | None, *, many: bool) -> Tile:
    """Like `grid.tile`; tensor cores take 64 rows, of which only some may be used."""
    return Tile(ROWS if many else 16, TOKENS, 4)


def tile_sums(
    rows: TileRows,
    tables: Array,
    keys: PackedKV,
    values: PackedKV | None,
    *,
    splits: int,
    parts: int,
    slopes: bool,
    softcap: float | None,
    interpret: bool,
) -> TileSums:
    """Computes the partial softmax of each tile, or of each split if `parts` programs share them.

    Split s of a tile begins at (lowest key >> power) + s splits; splits that a tile does not have
    are not written.
    """
    places = 1 if parts == 1 else splits
    static = MosaicConfig(keys, values, places, parts, slopes, softcap)
    tiles, kv_heads, count, _ = rows.q.shape
    width = (keys if values is None else values).dim
    lead = (tiles, kv_heads, places)
    shapes = [(*lead, count, width), (*lead, ROWS), (*lead, ROWS)]
    call = mosaic_common.mosaic_call(
        functools.partial(_kernel, static=static, count=count),
        "mosaic_attention",
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        {"tile": tiles, "head": kv_heads, "half": _halves(width), "part": parts},
        interpret=interpret,
    )
    pools = [keys.data]
    if values is not None or _halves(width) > 1:
        pools.append(keys.data if values is None else values.data)
    return TileSums(*call(*rows, tables, *pools))


def power_of_two(difference: Array) -> Array:
    """Computes 2 ** difference exactly, for integers up to 0."""
    exponent = jnp.maximum(difference, np.float32(-126)).astype(jnp.int32) + jnp.int32(127)
    return lax.bitcast_convert_type(exponent << jnp.int32(23), jnp.float32)


def _kernel(*refs: Any, static: MosaicConfig, count: int) -> None:
    rows_refs, (tables_ref, *pools) = TileRows(*refs[:4]), refs[4:-3]
    outs = TileSums(*refs[-3:])
    keys, values = static.keys, static.keys if static.values is None else static.values
    kind, columns = keys.tile_type, values.dim // _halves(values.dim)
    dims = [keys.dim, columns][: len(pools)]
    # Both operands of a matmul have the same layout in shared memory.
    order = mosaic_common.shared_memory_transforms(math.gcd(TOKENS, *dims), 16)
    run = functools.partial(
        _run,
        rows_refs=rows_refs,
        tables_ref=tables_ref,
        pools=pools,
        to=outs,
        static=static,
        count=count,
    )
    pl.run_scoped(
        run,
        plgpu.SMEM((ROWS, keys.dim), kind, transforms=order),
        plgpu.SMEM((ROWS, TOKENS), kind, transforms=order),
        (plgpu.SMEM((3, ROWS), jnp.int32), plgpu.SMEM((2, ROWS), jnp.float32)),
        TileSums(
            plgpu.SMEM(
                (ROWS, columns),
                jnp.float32,
                transforms=mosaic_common.shared_memory_transforms(columns, 32),
            ),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.SMEM((ROWS,), jnp.float32),
        ),
        [
            plgpu.SMEM((stages, TOKENS, dim), kind, transforms=order)
            for stages, dim in zip(_stages(dims), dims, strict=True)
        ],
        [plgpu.Barrier(num_barriers=stages) for stages in _stages(dims)],
        plgpu.Barrier(num_arrivals=3),
    )


def _stages(dims: Sequence[int]) -> list[int]:
    """Returns the pipeline stages: blocks of keys and values that fit into shared memory."""
    fixed_bytes = 2 * ROWS * (dims[0] + TOKENS) + 4 * ROWS * dims[-1] + 4096
    count = mosaic_common.pipeline_stages(2 * TOKENS * sum(dims), fixed_bytes)
    return [count] * len(dims) if count > 1 else [2, 1]


def _run(
    q_tile: Any,
    weights_tile: Any,
    known: Any,
    kept: TileSums,
    blocks: Sequence[Any],
    filled: Sequence[Any],
    ready: Any,
    *,
    rows_refs: TileRows,
    tables_ref: Any,
    pools: Sequence[Any],
    to: TileSums,
    static: MosaicConfig,
    count: int,
) -> None:
    """Runs one program, with its shared memory."""
    at, head, part = (lax.axis_index(name) for name in ("tile", "head", "part"))
    columns = pl.ds(_multiple(lax.axis_index("half"), kept.outs.shape[1]), kept.outs.shape[1])
    sequence, power, lowest, end = (rows_refs.tile[at, i] for i in range(4))
    within = (jnp.int32(1) << power) - 1
    plgpu.copy_gmem_to_smem(rows_refs.q.at[at, head], q_tile.at[pl.ds(0, count)], ready)
    plgpu.copy_gmem_to_smem(rows_refs.bounds.at[at], known[0], ready)
    plgpu.copy_gmem_to_smem(rows_refs.changes.at[at, head], known[1], ready)

    # The splits of this part, in cache blocks.
    before = lowest >> power
    each = jnp.maximum(((end - 1) >> power) + 1 - before, 0) + (static.parts - 1)
    each = lax.div(each, static.parts)
    begin = jnp.maximum((before + part * each) << power, lowest & -TOKENS)
    stop = jnp.minimum((before + (part + 1) * each) << power, end)
    steps = lax.div(jnp.maximum(stop - begin, 0) + (TOKENS - 1), TOKENS)

    def block_of(i: Array) -> Array:
        place = lax.div(begin, TOKENS) + i
        return tables_ref[sequence, jnp.minimum(place, tables_ref.shape[1] - 1)]

    def copy(which: int, i: Array) -> None:
        @pl.when(i < steps)
        def start() -> None:
            block, slot = pools[which].at[jnp.maximum(block_of(i), 0), head], slot_of(which, i)
            if which == 1:
                block = block.at[:, columns]
            plgpu.copy_gmem_to_smem(block, blocks[which].at[slot], filled[which].at[slot])

    def slot_of(which: int, i: Array) -> Array:
        return lax.rem(i, blocks[which].shape[0])

    for which, tiles in enumerate(blocks):
        for i in range(tiles.shape[0]):
            copy(which, jnp.int32(i))
    plgpu.barrier_wait(ready)
    low, last, position = (_row(known[0], i) for i in range(3))
    times, slope = (_row(known[1], i) for i in range(2))
    spans = _spans(kept.outs.shape[1])

    def nothing() -> tuple[Any, ...]:
        sums = tuple(_full((ROWS, size), 0.0) for _, size in spans)
        return sums, _full((ROWS,), LOWEST), _full((ROWS,), 0.0)

    def keep(sums: Sequence[Array], highest: Array, total: Array) -> None:
        if static.parts == 1:
            before, summed = _all(kept.highest), _all(kept.total)
            plgpu.commit_smem()  # several threads read a row's numbers
            maximum = jnp.maximum(before, highest)
            old, new = power_of_two(before - maximum), power_of_two(highest - maximum)
            total, highest = summed * old + total * new, maximum
        kept.highest[...], kept.total[...] = highest, total
        for (first, size), out in zip(spans, sums, strict=True):
            ref = kept.outs.at[:, pl.ds(first, size)]
            if static.parts == 1:
                out = ref[...] * broadcast_columns(old, size) + out * broadcast_columns(new, size)
            ref[...] = out

    def write(split: Array | int) -> None:
        """Writes the current sums to memory."""
        plgpu.commit_smem()
        outs = to.outs.at[at, head, split]
        plgpu.copy_smem_to_gmem(kept.outs.at[pl.ds(0, count)], outs.at[:, columns])
        plgpu.copy_smem_to_gmem(kept.highest, to.highest.at[at, head, split])
        plgpu.copy_smem_to_gmem(kept.total, to.total.at[at, head, split])
        plgpu.wait_smem_to_gmem(0)

    if static.parts == 1:
        sums, highest, total = nothing()
        kept.highest[...], kept.total[...] = highest, total
        for (first, size), out in zip(spans, sums, strict=True):
            kept.outs[:, pl.ds(first, size)] = out

    def step(i: Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
        sums, highest, total = state
        start, here, slot = begin + i * TOKENS, block_of(i) >= 0, slot_of(0, i)
        plgpu.barrier_wait(filled[0].at[slot])
        scores = _product(q_tile, blocks[0].at[slot].transpose((1, 0)), TOKENS)

        # A block in another pool is masked.
        first = jnp.where(here, start, jnp.int32(1 << 30))
        places = first + lax.broadcasted_iota(jnp.int32, (ROWS, TOKENS), 1)
        sees = (places >= broadcast_columns(low, TOKENS)) & (
            places <= broadcast_columns(last, TOKENS)
        )
        scores = scores * broadcast_columns(times, TOKENS)
        if static.softcap is not None:
            cap = np.float32(static.softcap)
            scores = cap * (1 - 2 / (jnp.exp(scores * (2 / cap)) + 1))
        if static.slopes:
            distance = (broadcast_columns(position, TOKENS) - places).astype(jnp.float32)
            scores = scores - broadcast_columns(slope, TOKENS) * distance
        scores = jnp.where(sees, scores * np.float32(_LOG2_E), np.float32(_NEVER))

        # Sums are reset at the beginning of a split.
        left = jnp.where((start & within) == 0, jnp.float32(0), jnp.float32(1))
        highest = highest * left + (1 - left) * np.float32(LOWEST)
        above = jnp.maximum(jnp.max(scores, axis=1), np.float32(LOWEST))
        maximum = jnp.maximum(highest, above.astype(jnp.int32).astype(jnp.float32) + 1)
        weights = jnp.where(
            sees, jnp.exp2(scores - broadcast_columns(maximum, TOKENS)), np.float32(0)
        )
        weights = weights.astype(weights_tile.dtype)
        scale = power_of_two(highest - maximum) * left
        total = total * scale + jnp.sum(weights.astype(jnp.float32), axis=1)
        weights_tile[...] = weights
        values = blocks[-1].at[slot_of(-1, i)]
        if len(blocks) > 1:
            plgpu.barrier_wait(filled[1].at[slot_of(1, i)])

        @pl.when((start < lowest) | (start + TOKENS > end) | ~here)
        def clear() -> None:
            """A masked value may be NaN, which a weight of 0 does not remove."""
            for column, many in spans:
                part = values.at[:, pl.ds(column, many)]
                place = first + lax.broadcasted_iota(jnp.int32, (TOKENS, many), 0)
                there = (place >= lowest) & (place < end)
                part[...] = jnp.where(there, part[...], jnp.zeros((), values.dtype))

        plgpu.commit_smem()
        sums = tuple(
            out * broadcast_columns(scale, many)
            + _product(weights_tile, values.at[:, pl.ds(column, many)], many)
            for (column, many), out in zip(spans, sums, strict=True)
        )
        plgpu.commit_smem()  # all warps have finished with the block
        for which, tiles in enumerate(blocks):
            copy(which, i + tiles.shape[0])

        @pl.when((((start + TOKENS) & within) == 0) | (i == steps - 1))
        def finish() -> None:
            keep(sums, maximum, total)
            if static.parts > 1:
                write((start >> power) - before)

        return sums, maximum, total

    lax.fori_loop(0, steps, step, nothing())
    if static.parts == 1:
        write(0)


def _product(left: Any, right: Any, columns: int) -> Array:
    """Computes left @ right, both in shared memory, accumulated in float32."""

    def run(total: Any) -> Array:
        plgpu.wgmma(total, left, right)
        return total[...]

    result: Array = pl.run_scoped(run, plgpu.ACC((ROWS, columns), jnp.float32))
    return result


def _halves(width: int) -> int:
    """Returns the programs that share a value's numbers: sums of 256 would fill all registers."""
    return 1 + (width > _MOST_COLUMNS)


def _multiple(number: Array, size: int) -> Any:
    return pl.multiple_of(number * size, size)


def _spans(width: int) -> list[tuple[int, int]]:
    """Returns (first, count) of the columns accumulated at once."""
    return [(first, min(_COLUMNS, width - first)) for first in range(0, width, _COLUMNS)]


def _row(ref: Any, i: int) -> Array:
    return plgpu.layout_cast(ref[i], plgpu.Layout.WGMMA.reduce(1))


def _all(ref: Any) -> Array:
    return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA.reduce(1))


def _full(shape: tuple[int, ...], value: float) -> Array:
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

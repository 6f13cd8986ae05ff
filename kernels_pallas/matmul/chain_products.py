"""Inside the persistent kernel: copies of weights that run ahead, and products.

Tiles of a link are numbered by part of the inputs, then by outputs, then by superblock; each
program has a run of whole (part, outputs). Both rings, of weights and of superblocks of x, are
counted through all links.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.matmul import unpack
from kernels_pallas.matmul.chain import BITS, MOST_ROWS, OUTPUTS, ChainCut
from kernels_pallas.matmul.round_fp16 import row_scale
from kernels_pallas.mosaic_common import plgpu
from kernels_pallas.ptx import mosaic_assembler, transposed_store

SLICE = 64  # inputs of a slice
WORDS, NUMBERS = BITS * SLICE, SLICE  # 16-bit numbers of a row in a tile
_LEVELS = 1 << BITS


class LinkRefs(NamedTuple):
    """A link's arrays in global memory.

    Attributes:
        split, superblocks: parts of the inputs, and superblocks of all.
        index: int32 [1], which matrix of the stacks.
        words, numbers: of each matrix, [matrices, outputs, superblocks * 256 or 64].
        x: float16 [superblocks, MOST_ROWS, 1024].
        highest: float32 [superblocks, MOST_ROWS], magnitudes that x is scaled by.
        parts: of each matrix, float32 [parts, MOST_ROWS, outputs].
    """

    split: int
    superblocks: int
    index: Any
    words: Sequence[Any]
    numbers: Sequence[Any]
    x: Any
    highest: Any
    parts: Sequence[Any]

    @property
    def ends(self) -> list[int]:
        """The tile after the last one of each matrix."""
        ends = [0]
        for words in self.words:
            ends.append(ends[-1] + words.shape[1] // OUTPUTS)
        return ends[1:]


class Shared(NamedTuple):
    """Shared memory, and barriers.

    Attributes:
        words, numbers, x: rings of tiles.
        filled, free: of the weights' ring: copied, and read by all consumers.
        x_filled, x_free: of the ring of x.
        joined: of all consumers.
        staged: in interpret mode decoded weights of each consumer.
    """

    words: Any
    numbers: Any
    x: Any
    filled: Any
    free: Any
    x_filled: Any
    x_free: Any
    joined: Any
    staged: Sequence[Any]


class _Share(NamedTuple):
    """A program's share of a link: (part, outputs) from `begin` on, with `each` superblocks."""

    begin: Array
    items: Array
    tiles: int
    each: int

    def place(self, unit: Array) -> tuple[Array, Array, Array]:
        """Part, outputs and superblock of a tile of this share."""
        item, inner = self.begin + lax.div(unit, self.each), lax.rem(unit, self.each)
        part = lax.div(item, self.tiles)
        return part, lax.rem(item, self.tiles), part * self.each + inner

    @property
    def units(self) -> Array:
        """Number of tiles."""
        return self.items * self.each


def _share(cut: ChainCut, link: LinkRefs) -> _Share:
    program, tiles = lax.axis_index("program"), link.ends[-1]
    items = tiles * link.split
    begin = lax.div(program * items, cut.programs)
    end = lax.div((program + 1) * items, cut.programs)
    return _Share(begin, end - begin, tiles, link.superblocks // link.split)


def produce(cut: ChainCut, links: Sequence[LinkRefs], shared: Shared) -> None:
    """Copies all weights of this program's share, as fast as stages become free."""
    copied = jnp.int32(0)
    for link in links:
        share = _share(cut, link)

        def copy(unit: Array, i: Array, link: LinkRefs = link, share: _Share = share) -> Array:
            slot = lax.rem(i, cut.stages)

            @pl.when(i >= cut.stages)
            def wait() -> None:
                plgpu.barrier_wait(shared.free.at[slot])

            _, tile, superblock = share.place(unit)
            _copy_tile(link, tile, superblock, shared, slot)
            return i + 1

        copied = lax.fori_loop(0, share.units, copy, copied)


def _copy_tile(link: LinkRefs, tile: Array, superblock: Array, shared: Shared, slot: Array) -> None:
    begin = 0
    for words, numbers, end in zip(link.words, link.numbers, link.ends, strict=True):

        @pl.when((tile >= begin) & (tile < end))
        def start(words: Any = words, numbers: Any = numbers, begin: int = begin) -> None:
            outputs = pl.ds(pl.multiple_of((tile - begin) * OUTPUTS, OUTPUTS), OUTPUTS)
            for source, to in ((words, shared.words), (numbers, shared.numbers)):
                size = to.shape[2]
                columns = pl.ds(pl.multiple_of(superblock * size, size), size)
                plgpu.copy_gmem_to_smem(
                    source.at[link.index[0], outputs, columns], to.at[slot], shared.filled.at[slot]
                )

        begin = end


def consume(
    cut: ChainCut,
    link: LinkRefs,
    shared: Shared,
    consumer: Array,
    done: tuple[Array, Array],
    *,
    interpret: bool,
) -> tuple[Array, Array]:
    """A consumer's share of a link's products.

    Args:
        done: tiles of weights, and superblocks of x, that both rings have had.
    """
    share = _share(cut, link)
    before, x_before = done
    # Of one superblock an item, x changes with the part; else with each tile.
    changes = share.each > 1
    first_part = share.place(jnp.int32(0))[0]
    last = jnp.maximum(share.units - 1, 0)
    count = share.units if changes else share.place(last)[0] - first_part + 1
    count = jnp.where(share.items > 0, count, 0)

    def copy_x(which: Array) -> None:
        @pl.when((consumer == 0) & (which < count))
        def start() -> None:
            slot = lax.rem(x_before + which, cut.x_stages)
            superblock = share.place(which)[2] if changes else first_part + which
            plgpu.copy_gmem_to_smem(
                link.x.at[superblock], shared.x.at[slot], shared.x_filled.at[slot]
            )

    for i in range(cut.x_stages):
        copy_x(jnp.int32(i))

    def step(unit: Array, total: Array) -> Array:
        part, tile, superblock = share.place(unit)
        which = unit if changes else part - first_part
        slot, x_slot = lax.rem(before + unit, cut.stages), lax.rem(x_before + which, cut.x_stages)
        inner = lax.rem(unit, share.each)
        starts = (tile == 0) | (unit == 0)
        ends = (tile == share.tiles - 1) | (unit == share.units - 1)

        @pl.when(changes | starts)
        def wait() -> None:
            plgpu.barrier_wait(shared.x_filled.at[x_slot])

        highest = plgpu.layout_cast(
            plgpu.load(link.highest.at[superblock], optimized=False), plgpu.Layout.WGMMA.reduce(0)
        )
        plgpu.barrier_wait(shared.filled.at[slot])
        sums = _multiply(cut, shared, slot, x_slot, consumer, interpret)
        plgpu.barrier_arrive(shared.free.at[slot])

        @pl.when(changes | ends)
        def leave() -> None:
            plgpu.barrier_arrive(shared.x_free.at[x_slot])

            @pl.when(consumer == 0)
            def wait() -> None:
                plgpu.barrier_wait(shared.x_free.at[x_slot])

            copy_x(which + cut.x_stages)

        scaled = sums * lax.broadcast_in_dim(row_scale(highest), sums.shape, (1,))
        kept = jnp.where(inner == 0, jnp.float32(0), jnp.float32(1))
        total = total * kept + scaled

        @pl.when(inner == share.each - 1)
        def write() -> None:
            _write(link, part * cut.consumers + consumer, tile, total, interpret=interpret)

        return total

    zero = plgpu.layout_cast(jnp.zeros((OUTPUTS, MOST_ROWS), jnp.float32), plgpu.Layout.WGMMA)
    lax.fori_loop(0, share.units, step, zero)
    return before + share.units, x_before + count


def _write(link: LinkRefs, part: Array, tile: Array, total: Array, *, interpret: bool) -> None:
    begin = 0
    for parts, end in zip(link.parts, link.ends, strict=True):

        @pl.when((tile >= begin) & (tile < end))
        def write(parts: Any = parts, begin: int = begin) -> None:
            outputs = pl.ds(pl.multiple_of((tile - begin) * OUTPUTS, OUTPUTS), OUTPUTS)
            target = parts.at[part, :, outputs]
            if interpret:
                target[...] = total.T
            else:
                transposed_store(target, total)

        begin = end


def _multiply(
    cut: ChainCut, shared: Shared, slot: Array, x_slot: Array, consumer: Array, interpret: bool
) -> Array:
    """The sums of a consumer's slices of a tile, [OUTPUTS, MOST_ROWS]."""
    own = BITS // cut.consumers  # words of each column

    def run(total: Any) -> Array:
        def part(ref: Any, column: Any) -> Array:
            tile = ref.at[slot, :, pl.ds(column, SLICE)]
            return plgpu.layout_cast(tile[...], plgpu.Layout.WGMMA)

        asm = not interpret
        with mosaic_assembler():
            numbers = unpack.prepare_scales(part(shared.numbers, 0), _LEVELS, False, 0, asm=asm)
            for n in range(own):
                word = consumer * own + n
                codes = part(shared.words, pl.multiple_of(word * SLICE, SLICE))
                for high in range(2):
                    for e in range(2):
                        f = unpack.whole_fraction(codes, BITS, BITS * high, e, asm=asm)
                        (w,) = unpack.weights(f, [numbers], _LEVELS, asm=asm)
                        at = (2 * (word + BITS * high) + e) * SLICE
                        columns = pl.ds(pl.multiple_of(at, SLICE), SLICE)
                        x = shared.x.at[x_slot, :, columns].transpose((1, 0))
                        for stage in shared.staged:
                            stage[consumer] = w
                            plgpu.commit_smem()
                        left = shared.staged[0].at[consumer] if interpret else w
                        plgpu.wgmma(total, left, x)
                        plgpu.wgmma_wait(0 if interpret else 1)
        return total[...]

    result: Array = pl.run_scoped(run, plgpu.ACC((OUTPUTS, MOST_ROWS), jnp.float32))
    return result
